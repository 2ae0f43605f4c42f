//! Validated configuration of groups and layers, and of low-latency groups.
#![forbid(unsafe_code)]

mod low_latency;

pub(crate) use low_latency::{LL_DTYPES, LL_ELEMENTS};
pub use low_latency::{LlConfig, LlRequest};

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::limits::{self, Limits};
use std::fmt;

/// Most experts per token that the interface knows. Engines may take fewer.
pub const MAX_TOP_K: u32 = 64;

/// What tokens can be made of.
const TOKEN_DTYPES: [DType; 5] =
    [DType::Float32, DType::Float16, DType::BFloat16, DType::Float8E4M3, DType::Float8E5M2];

/// Whether payloads go through the library's buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transfer {
    /// Through staging buffers.
    Staged,
    /// Directly between the callers' windows.
    ZeroCopy,
}

/// How many rows a rank can receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecvCapacity {
    /// As many as a step needs: the caller reads the total after prepare and sizes its buffers by it.
    Eager,
    /// At most so many.
    Fixed(u32),
}

/// What happens to rows beyond a fixed capacity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overflow {
    /// The step fails on the device.
    Trap,
    /// They are dropped.
    Drop,
}

/// What happens when a registered layer comes with another handle memory than before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Relocation {
    /// It is an error.
    Refuse,
    /// The handle is rebuilt over the new memory.
    Rebuild,
}

/// What a caller asks a group to be, before it is checked; numbers as C gives them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are documented in the C headers under the same names")]
pub struct GroupRequest {
    pub ep_size: i32,
    pub num_experts: i32,
    pub max_tokens_per_rank: i32,
    pub max_recv_tokens_per_rank: i32,
    pub hidden_dim: i32,
    pub max_num_sms: i32,
    pub max_token_dtype: i32,
    pub zero_copy: i32,
    pub allow_handle_mem_reloc: i32,
    pub num_topk: i32,
    pub drop_on_overflow: i32,
    /// What the ABI has that others do not.
    pub dialect: Dialect,
}

/// Where the ABIs differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dialect {
    /// The name of the field that caps the multiprocessors.
    pub sm_field: &'static str,
    /// The name of the argument that configures a layer.
    pub layer_argument: &'static str,
    /// How `num_topk` is given: a field of the configuration, or an option.
    pub num_topk: &'static str,
    /// How dropping is asked for.
    pub overflow: &'static str,
    /// Whether `max_recv_tokens_per_rank` = 0 asks for eager mode.
    pub eager: bool,
    /// How many handles are kept unless `NVTE_EP_HANDLE_CACHE_SIZE` says otherwise.
    pub default_handle_limit: usize,
}

impl Dialect {
    /// The register_layer ABI.
    pub const REGISTER_LAYER: Self = Self {
        sm_field: "max_num_sms",
        layer_argument: "layer_config",
        num_topk: "option num_topk",
        overflow: "option overflow",
        eager: false,
        default_handle_limit: 8192,
    };
    /// TransformerEngine's ABI since 2.19.
    pub const TE: Self = Self {
        sm_field: "num_comm_sms",
        layer_argument: "layer_cfg",
        num_topk: "group_config.num_topk",
        overflow: "group_config.drop_on_overflow",
        eager: true,
        default_handle_limit: 4096,
    };
}

/// What a group is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupConfig {
    /// Number of ranks.
    pub ep_size: u32,
    /// Number of experts over all ranks.
    pub num_experts: u32,
    /// Most tokens a rank dispatches in one step.
    pub max_tokens_per_rank: u32,
    /// Rows of a rank's receive buffers.
    pub recv_capacity: RecvCapacity,
    /// Elements of a token row, at most.
    pub hidden_dim: u32,
    /// Streaming multiprocessors for communication; none = chosen at initialize.
    pub max_num_sms: Option<u32>,
    /// Widest data type of a token.
    pub max_token_dtype: DType,
    /// Staged or zero-copy.
    pub transfer: Transfer,
    /// What a moved handle memory means.
    pub relocation: Relocation,
    /// Most experts per token of any layer, where the caller says.
    pub num_topk: Option<u32>,
    /// What happens to rows beyond the capacity.
    pub overflow: Overflow,
    /// For the names in messages.
    pub dialect: Dialect,
    /// What the group's engine takes.
    pub limits: &'static Limits,
}

impl GroupConfig {
    /// Experts that one rank owns.
    #[must_use]
    pub const fn local_experts(&self) -> u32 {
        self.num_experts / self.ep_size
    }

    /// Bytes of the longest token row, which size the staging buffers.
    #[must_use]
    pub const fn max_token_bytes(&self) -> usize {
        self.max_token_dtype.bytes(self.hidden_dim as usize)
    }
}

const CONFIG: &str = "group_config";

fn field(name: &str) -> String {
    format!("{CONFIG}.{name}")
}

fn positive(name: &str, value: i32) -> Result<u32> {
    u32::try_from(value)
        .ok()
        .filter(|&value| value > 0)
        .ok_or_else(|| Error::argument(field(name), "must be greater than 0", value))
}

/// For groups over NCCL EP.
impl TryFrom<GroupRequest> for GroupConfig {
    type Error = Error;

    fn try_from(request: GroupRequest) -> Result<Self> {
        Self::of(request, &limits::NCCL_EP)
    }
}

impl GroupConfig {
    /// The configuration that a caller asks for, of a group whose engine has these limits.
    ///
    /// # Errors
    /// The first broken rule.
    pub fn of(request: GroupRequest, limits: &'static Limits) -> Result<Self> {
        let GroupRequest {
            ep_size,
            num_experts,
            max_tokens_per_rank,
            max_recv_tokens_per_rank,
            hidden_dim,
            max_num_sms,
            max_token_dtype,
            zero_copy,
            allow_handle_mem_reloc,
            num_topk,
            drop_on_overflow,
            dialect,
        } = request;
        let flag = |name: &str, value: i32, meaning: &str| match value {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(Error::argument(field(name), format!("must be 0 or 1 ({meaning})"), other)),
        };
        let count = |name: &str, value: i32, zero: &str| match u32::try_from(value) {
            Ok(0) => Ok(None),
            Ok(value) => Ok(Some(value)),
            Err(_) => Err(Error::argument(field(name), format!("must be 0 ({zero}) or more"), value)),
        };
        // Looked at first: what a caller of a shorter structure passes behind it is nobody's.
        let relocation = match flag("allow_handle_mem_reloc", allow_handle_mem_reloc, "1 = rebuild") {
            Ok(true) => Relocation::Rebuild,
            Ok(false) => Relocation::Refuse,
            Err(error)
                if DType::from_nvte(allow_handle_mem_reloc).is_some_and(|dtype| TOKEN_DTYPES.contains(&dtype)) =>
            {
                return Err(error.with_remedy(
                    "this is the number of a token's data type, which stands here in earlier headers, whose NVTEEpGroupConfig \
                     has no allow_handle_mem_reloc: compile the program with the headers of this library",
                ));
            }
            Err(error) => return Err(error),
        };
        let dtype = match max_token_dtype {
            0 => DType::BFloat16,
            code => DType::from_nvte(code).filter(|dtype| TOKEN_DTYPES.contains(dtype)).ok_or_else(|| {
                let rule =
                    "must be the NVTEDType of the widest token: a floating-point type of 8 to 32 bits (0 = BFloat16)";
                Error::argument(field("max_token_dtype"), rule, code)
            })?,
        };
        let config = Self {
            ep_size: positive("ep_size", ep_size)?,
            num_experts: positive("num_experts", num_experts)?,
            max_tokens_per_rank: positive("max_tokens_per_rank", max_tokens_per_rank)?,
            recv_capacity: match max_recv_tokens_per_rank {
                0 if dialect.eager => RecvCapacity::Eager,
                rows => RecvCapacity::Fixed(positive("max_recv_tokens_per_rank", rows)?),
            },
            hidden_dim: positive("hidden_dim", hidden_dim)?,
            max_num_sms: count(dialect.sm_field, max_num_sms, "automatic")?,
            max_token_dtype: dtype,
            transfer: if flag("zero_copy", zero_copy, "1 = payloads lie in windows")? {
                Transfer::ZeroCopy
            } else {
                Transfer::Staged
            },
            relocation,
            num_topk: count("num_topk", num_topk, "not said")?,
            overflow: if flag("drop_on_overflow", drop_on_overflow, "1 = drop")? {
                Overflow::Drop
            } else {
                Overflow::Trap
            },
            dialect,
            limits,
        };
        config.check()?;
        Ok(config)
    }
}

impl GroupConfig {
    /// The rules between fields.
    fn check(&self) -> Result<()> {
        let limits = self.limits;
        if !self.num_experts.is_multiple_of(self.ep_size) {
            return Err(Error::argument(
                field("num_experts"),
                format!("must be a multiple of ep_size, {}", self.ep_size),
                self.num_experts,
            )
            .with_remedy("change num_experts, or start another number of ranks"));
        }
        for (name, found, most) in
            [("ep_size", self.ep_size, limits.ranks), ("num_experts", self.num_experts, limits.experts)]
        {
            if found > most {
                let required = format!("must be at most {most} with {}", limits.name);
                return Err(Error::argument(field(name), required, found)
                    .with_remedy("lower it, or set the option backend to nccl_ep"));
            }
        }
        if self.local_experts() > limits.local_experts {
            return Err(Error::argument(
                field("num_experts"),
                format!("must give a rank at most {} experts", limits.local_experts),
                format!("{} experts on {} ranks", self.num_experts, self.ep_size),
            )
            .with_remedy("spread them over more ranks"));
        }
        if !(self.local_experts() * self.ep_size).is_multiple_of(limits.experts_multiple) {
            return Err(Error::argument(
                field("num_experts"),
                format!(
                    "must be a multiple of {0} ({1} moves routing rows of {0} experts)",
                    limits.experts_multiple, limits.name
                ),
                self.num_experts,
            )
            .with_remedy("add experts that no token is routed to"));
        }
        match self.recv_capacity {
            RecvCapacity::Fixed(rows) if rows < self.dispatch_limit() => {
                return Err(Error::argument(
                    field("max_recv_tokens_per_rank"),
                    format!(
                        "must be at least max_tokens_per_rank, {}, rounded up to a multiple of {}",
                        self.max_tokens_per_rank, limits.tokens_multiple
                    ),
                    rows,
                )
                .with_remedy(
                    "ep_size * max_tokens_per_rank * top_k, and the padding of every local expert, hold any routing",
                ));
            }
            RecvCapacity::Fixed(_) => {}
            RecvCapacity::Eager => self.check_eager()?,
        }
        if let Some(num_topk) = self.num_topk.filter(|top_k| *top_k > limits.top_k.min(self.num_experts)) {
            let required = format!("must be at most {} experts per token", limits.top_k.min(self.num_experts));
            return Err(Error::argument(self.dialect.num_topk, required, num_topk));
        }
        if self.transfer == Transfer::ZeroCopy {
            self.check_zero_copy()?;
        }
        let bytes = self.max_token_bytes();
        if !bytes.is_multiple_of(limits.row_bytes_multiple) || u32::try_from(bytes).is_err() {
            return Err(Error::argument(
                field("hidden_dim"),
                format!(
                    "must make a token row a multiple of {} bytes, below 4 GiB, in {}",
                    limits.row_bytes_multiple, self.max_token_dtype
                ),
                format!("{} elements = {bytes} bytes", self.hidden_dim),
            ));
        }
        Ok(())
    }
}

impl GroupConfig {
    /// The token limit that the engine is told.
    #[must_use]
    pub const fn dispatch_limit(&self) -> u32 {
        self.max_tokens_per_rank.next_multiple_of(self.limits.tokens_multiple)
    }

    /// Rows that the internal buffers hold: the fixed capacity, or in eager mode what any routing needs unpadded.
    #[must_use]
    pub fn internal_rows(&self) -> u64 {
        match self.recv_capacity {
            RecvCapacity::Fixed(rows) => rows.into(),
            RecvCapacity::Eager => {
                let tokens = u64::from(self.ep_size) * u64::from(self.dispatch_limit());
                tokens.saturating_mul(self.num_topk.unwrap_or(1).into())
            }
        }
    }

    /// The rules of zero-copy groups.
    fn check_zero_copy(&self) -> Result<()> {
        let (zero_copy, limits) = ("in zero-copy groups", &self.limits.zero_copy);
        if limits.power_of_two_experts && !self.local_experts().is_power_of_two() {
            let required = format!("must give every rank a power of two of experts {zero_copy}");
            let found = format!("{} experts a rank", self.local_experts());
            return Err(Error::argument(field("num_experts"), required, found)
                .with_remedy("add experts that no token is routed to, or set zero_copy = 0"));
        }
        if self.ep_size > limits.ranks {
            let required = format!("must be at most {} {zero_copy}", limits.ranks);
            return Err(Error::argument(field("ep_size"), required, self.ep_size));
        }
        match self.recv_capacity {
            RecvCapacity::Fixed(rows) if rows > limits.recv_rows => {
                let required = format!("must be at most {} {zero_copy}", limits.recv_rows);
                Err(Error::argument(field("max_recv_tokens_per_rank"), required, rows))
            }
            _ => Ok(()),
        }
    }

    /// The rules of eager mode.
    fn check_eager(&self) -> Result<()> {
        let eager = "in eager mode (max_recv_tokens_per_rank = 0)";
        if self.transfer == Transfer::ZeroCopy {
            return Err(Error::argument(field("zero_copy"), format!("must be 0 {eager}"), 1));
        }
        if self.overflow == Overflow::Drop {
            let required = format!("must not ask for dropping {eager}, which has no capacity");
            return Err(Error::argument(self.dialect.overflow, required, "drop"));
        }
        if self.num_topk.is_none() {
            let required = format!("must be the largest top_k of any layer {eager}");
            return Err(Error::argument(self.dialect.num_topk, required, 0));
        }
        if u32::try_from(self.internal_rows()).is_err() {
            let required = format!("must make ep_size * max_tokens_per_rank * num_topk fit 32 bits {eager}");
            return Err(Error::argument(field("max_tokens_per_rank"), required, self.internal_rows()));
        }
        Ok(())
    }
}

/// Padding of each expert's slab, in tokens: a power of two; 1 = none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlabAlignment(u32);

impl SlabAlignment {
    /// Parses the C argument `argument`; 0 and 1 both mean no padding.
    ///
    /// # Errors
    /// A value that is no power of two or does not fit NCCL EP's `int`.
    pub fn parse(argument: impl fmt::Display, value: usize) -> Result<Self> {
        u32::try_from(value.max(1))
            .ok()
            .filter(|value| value.is_power_of_two() && i32::try_from(*value).is_ok())
            .map(Self)
            .ok_or_else(|| {
                Error::argument(argument.to_string(), "must be 0, 1 or another power of two below 2^31", value)
            })
    }

    /// In tokens, 1 or more.
    #[must_use]
    pub const fn tokens(self) -> u32 {
        self.0
    }
}

impl fmt::Display for SlabAlignment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            1 => f.write_str("0 or 1 (no padding)"),
            tokens => write!(f, "{tokens}"),
        }
    }
}

/// What a layer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerConfig {
    /// Experts per token.
    pub top_k: u32,
    /// Padding of each expert's slab.
    pub alignment: SlabAlignment,
}

impl LayerConfig {
    /// Parses the fields of the C argument `argument`.
    ///
    /// # Errors
    /// `top_k` outside 1 to [`MAX_TOP_K`], or an alignment that [`SlabAlignment::parse`] refuses.
    pub fn parse(argument: &str, top_k: i32, alignment: usize) -> Result<Self> {
        let top_k = u32::try_from(top_k).ok().filter(|k| (1..=MAX_TOP_K).contains(k)).ok_or_else(|| {
            Error::argument(format!("{argument}.top_k"), format!("must be 1 to {MAX_TOP_K} experts per token"), top_k)
        })?;
        let name = format_args!("{argument}.dispatch_output_per_expert_alignment");
        let alignment = SlabAlignment::parse(name, alignment)?;
        Ok(Self { top_k, alignment })
    }

    /// # Errors
    /// More experts per token than the group has experts, or than its engine takes.
    pub fn check_against(&self, group: &GroupConfig) -> Result<()> {
        let (most, what) = match group.num_topk {
            Some(num_topk) => (num_topk, "num_topk"),
            None => (group.num_experts, "num_experts"),
        };
        let argument = |name| format!("{}.{name}", group.dialect.layer_argument);
        if self.top_k > most {
            let required = format!("must be at most the group's {what}, {most}");
            return Err(Error::argument(argument("top_k"), required, self.top_k));
        }
        if self.top_k > group.limits.top_k {
            let required =
                format!("must be at most {} experts per token with {}", group.limits.top_k, group.limits.name);
            return Err(Error::argument(argument("top_k"), required, self.top_k));
        }
        if group.transfer == Transfer::ZeroCopy {
            self.check_zero_copy(group, argument)?;
        }
        Ok(())
    }

    fn check_zero_copy(&self, group: &GroupConfig, argument: impl Fn(&'static str) -> String) -> Result<()> {
        let (duplicates, limits) = (self.top_k.min(group.local_experts()), &group.limits.zero_copy);
        if duplicates > limits.duplicates {
            let required =
                format!("must give a token at most {} experts on one rank in zero-copy groups", limits.duplicates);
            let found = format!("top_k {} with {} experts a rank", self.top_k, group.local_experts());
            return Err(Error::argument(argument("top_k"), required, found).with_remedy("set zero_copy = 0"));
        }
        match group.recv_capacity {
            RecvCapacity::Fixed(rows)
                if limits.aligned_capacity
                    && group.overflow == Overflow::Drop
                    && !rows.is_multiple_of(self.alignment.tokens()) =>
            {
                let required = format!(
                    "must divide max_recv_tokens_per_rank, {rows}, in zero-copy groups that drop what exceeds it"
                );
                let name = argument("dispatch_output_per_expert_alignment");
                Err(Error::argument(name, required, self.alignment.tokens()))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    pub(crate) use super::low_latency::tests::LL_REQUEST;
    use super::*;

    pub(crate) const REQUEST: GroupRequest = GroupRequest {
        ep_size: 4,
        num_experts: 16,
        max_tokens_per_rank: 64,
        max_recv_tokens_per_rank: 512,
        hidden_dim: 512,
        max_num_sms: 0,
        max_token_dtype: 0,
        zero_copy: 0,
        allow_handle_mem_reloc: 0,
        num_topk: 0,
        drop_on_overflow: 0,
        dialect: Dialect::REGISTER_LAYER,
    };

    #[test]
    fn defaults_are_resolved() {
        let config = GroupConfig::try_from(REQUEST).unwrap();
        assert_eq!((config.local_experts(), config.max_token_bytes()), (4, 1024));
        assert_eq!((config.max_num_sms, config.max_token_dtype), (None, DType::BFloat16));
        assert_eq!(config.transfer, Transfer::Staged);
    }

    #[test]
    fn any_token_limit_is_taken() {
        for (limit, told) in [(1, 4), (33, 36), (60, 60), (64, 64)] {
            let config = GroupConfig::try_from(GroupRequest { max_tokens_per_rank: limit, ..REQUEST }).unwrap();
            assert_eq!(config.dispatch_limit(), told);
        }
        let request = GroupRequest { max_tokens_per_rank: 61, max_recv_tokens_per_rank: 63, ..REQUEST };
        let text = GroupConfig::try_from(request).unwrap_err().to_string();
        assert!(text.contains("at least max_tokens_per_rank, 61, rounded up to a multiple of 4, got 63"), "{text}");
    }

    #[test]
    fn every_bad_field_is_named_with_what_was_found() {
        type Change = fn(&mut GroupRequest);
        let cases: &[(Change, &str)] = &[
            (|r| r.ep_size = 0, "group_config.ep_size must be greater than 0, got 0"),
            (|r| r.num_experts = -4, "group_config.num_experts must be greater than 0, got -4"),
            (
                |r| r.num_experts = 10,
                "group_config.num_experts must be a multiple of ep_size, 4, got 10; change num_experts, or start another number of ranks",
            ),
            (|r| r.num_experts = 4 * 257, "at most 256 experts, got 1028 experts on 4 ranks"),
            (|r| (r.ep_size, r.num_experts) = (3, 6), "must be a multiple of 4"),
            (|r| r.max_tokens_per_rank = 0, "group_config.max_tokens_per_rank must be greater than 0, got 0"),
            (|r| r.max_recv_tokens_per_rank = 0, "group_config.max_recv_tokens_per_rank must be greater than 0, got 0"),
            (
                |r| r.max_recv_tokens_per_rank = 63,
                "must be at least max_tokens_per_rank, 64, rounded up to a multiple of 4, got 63",
            ),
            (|r| r.hidden_dim = 0, "group_config.hidden_dim must be greater than 0, got 0"),
            (|r| r.hidden_dim = 4, "got 4 elements = 8 bytes"),
            (|r| r.hidden_dim = 100, "multiple of 16 bytes, below 4 GiB, in bfloat16, got 100 elements = 200 bytes"),
            (|r| (r.hidden_dim, r.max_token_dtype) = (1 << 30, 4), "below 4 GiB"),
            (|r| r.max_num_sms = -1, "group_config.max_num_sms must be 0 (automatic) or more, got -1"),
            (|r| r.max_token_dtype = 11, "group_config.max_token_dtype must be the NVTEDType"),
            (|r| r.max_token_dtype = -1, "got -1"),
            (|r| r.max_token_dtype = 3, "a floating-point type of 8 to 32 bits (0 = BFloat16), got 3"),
            (
                |r| r.allow_handle_mem_reloc = 2,
                "group_config.allow_handle_mem_reloc must be 0 or 1 (1 = rebuild), got 2",
            ),
            (
                // Of 32 bytes: the type in the place of allow_handle_mem_reloc, zero_copy in that of the type, and anything behind.
                |r| (r.allow_handle_mem_reloc, r.max_token_dtype, r.zero_copy) = (6, 1, 0x7fff),
                "group_config.allow_handle_mem_reloc must be 0 or 1 (1 = rebuild), got 6; this is the number of a token's data \
                 type, which stands here in earlier headers, whose NVTEEpGroupConfig has no allow_handle_mem_reloc: compile the \
                 program with the headers of this library",
            ),
            (|r| r.num_topk = -1, "group_config.num_topk must be 0 (not said) or more, got -1"),
            (|r| r.num_topk = 17, "option num_topk must be at most 16 experts per token, got 17"),
            (
                |r| (r.zero_copy, r.num_experts) = (1, 12),
                "must give every rank a power of two of experts in zero-copy groups, got 3 experts a rank",
            ),
            (
                |r| (r.zero_copy, r.max_recv_tokens_per_rank) = (1, (1 << 22) + 1),
                "max_recv_tokens_per_rank must be at most 4194304 in zero-copy groups, got 4194305",
            ),
            (|r| r.drop_on_overflow = -1, "group_config.drop_on_overflow must be 0 or 1 (1 = drop), got -1"),
            (|r| r.zero_copy = 2, "group_config.zero_copy must be 0 or 1 (1 = payloads lie in windows), got 2"),
        ];
        for (change, expected) in cases {
            let mut request = REQUEST;
            change(&mut request);
            let text = GroupConfig::try_from(request).unwrap_err().to_string();
            assert!(text.contains(expected), "{text:?} lacks {expected:?}");
            let earlier = (text.contains("earlier headers"), expected.contains("earlier headers"));
            assert_eq!(earlier.0, earlier.1, "the numbers of earlier headers' data types only: {text}");
        }
    }

    #[test]
    fn the_limits_themselves_are_taken() {
        type Change = fn(&mut GroupRequest);
        let taken: [Change; 6] = [
            |r| r.num_experts = 4 * 256,
            |r| r.max_recv_tokens_per_rank = 64,
            |r| r.num_topk = 16,
            |r| (r.num_experts, r.num_topk) = (64, 32),
            |r| (r.zero_copy, r.ep_size, r.num_experts) = (1, 128, 128),
            |r| (r.zero_copy, r.max_recv_tokens_per_rank) = (1, 1 << 22),
        ];
        for (case, change) in taken.into_iter().enumerate() {
            let mut request = REQUEST;
            change(&mut request);
            GroupConfig::try_from(request).unwrap_or_else(|error| panic!("case {case}: {error}"));
        }
        let refused = |change: Change| {
            let mut request = REQUEST;
            change(&mut request);
            GroupConfig::try_from(request).unwrap_err().to_string()
        };
        assert_eq!(
            refused(|r| (r.zero_copy, r.ep_size, r.num_experts) = (1, 132, 132)),
            "group_config.ep_size must be at most 128 in zero-copy groups, got 132"
        );
        assert_eq!(
            refused(|r| (r.num_experts, r.num_topk) = (64, 33)),
            "option num_topk must be at most 32 experts per token, got 33"
        );
        // A layer of as many experts per token as num_topk says.
        let group = GroupConfig::try_from(GroupRequest { num_topk: 8, ..REQUEST }).unwrap();
        LayerConfig::parse("layer_config", 8, 0).unwrap().check_against(&group).unwrap();
        let text = LayerConfig::parse("layer_config", 9, 0).unwrap().check_against(&group).unwrap_err().to_string();
        assert_eq!(text, "layer_config.top_k must be at most the group's num_topk, 8, got 9");
        let group = GroupConfig::try_from(GroupRequest { num_experts: 64, ..REQUEST }).unwrap();
        LayerConfig::parse("layer_config", 32, 0).unwrap().check_against(&group).unwrap();
    }

    #[test]
    fn an_alignment_is_named_as_callers_give_it() {
        let text = |alignment| LayerConfig::parse("layer_config", 2, alignment).unwrap().alignment.to_string();
        assert_eq!([text(0), text(1), text(128)], ["0 or 1 (no padding)", "0 or 1 (no padding)", "128"]);
    }

    #[test]
    fn eager_mode() {
        type Change = fn(&mut GroupRequest);
        let eager = GroupRequest { max_recv_tokens_per_rank: 0, num_topk: 8, dialect: Dialect::TE, ..REQUEST };
        let config = GroupConfig::try_from(eager).unwrap();
        assert_eq!((config.recv_capacity, config.internal_rows()), (RecvCapacity::Eager, 4 * 64 * 8));
        let cases: &[(Change, &str)] = &[
            (|r| r.zero_copy = 1, "group_config.zero_copy must be 0 in eager mode"),
            (|r| r.drop_on_overflow = 1, "group_config.drop_on_overflow must not ask for dropping in eager mode"),
            (|r| r.num_topk = 0, "group_config.num_topk must be the largest top_k of any layer in eager mode"),
            (|r| r.max_tokens_per_rank = i32::MAX, "fit 32 bits in eager mode"),
            (|r| r.max_num_sms = -2, "group_config.num_comm_sms must be 0 (automatic) or more, got -2"),
        ];
        for (change, expected) in cases {
            let mut request = eager;
            change(&mut request);
            let text = GroupConfig::try_from(request).unwrap_err().to_string();
            assert!(text.contains(expected), "{text:?} lacks {expected:?}");
        }
    }

    #[test]
    fn layers_of_zero_copy_groups() {
        let request = GroupRequest { zero_copy: 1, num_experts: 64, max_recv_tokens_per_rank: 520, ..REQUEST };
        let group = GroupConfig::try_from(request).unwrap();
        LayerConfig::parse("layer_config", 8, 128).unwrap().check_against(&group).unwrap();
        let text = LayerConfig::parse("layer_config", 9, 0).unwrap().check_against(&group).unwrap_err().to_string();
        assert_eq!(
            text,
            "layer_config.top_k must give a token at most 8 experts on one rank in zero-copy groups, got top_k 9 with 16 \
             experts a rank; set zero_copy = 0"
        );
        let staged = GroupConfig::try_from(GroupRequest { zero_copy: 0, ..request }).unwrap();
        LayerConfig::parse("layer_config", 9, 0).unwrap().check_against(&staged).unwrap();
        // Few experts a rank cannot give a token more duplicates than there are.
        let narrow = GroupConfig::try_from(GroupRequest { zero_copy: 1, num_experts: 32, ..REQUEST }).unwrap();
        LayerConfig::parse("layer_config", 16, 0).unwrap().check_against(&narrow).unwrap();
        let drop = GroupConfig::try_from(GroupRequest { drop_on_overflow: 1, ..request }).unwrap();
        LayerConfig::parse("layer_config", 2, 8).unwrap().check_against(&drop).unwrap();
        let text = LayerConfig::parse("layer_config", 2, 16).unwrap().check_against(&drop).unwrap_err().to_string();
        assert!(text.contains("alignment must divide max_recv_tokens_per_rank, 520, in zero-copy groups"), "{text}");
    }

    #[test]
    fn sizes_do_not_overflow() {
        let mut request = REQUEST;
        (request.ep_size, request.num_experts) = (i32::MAX, i32::MAX);
        // Odd number of experts: refused by the rule of 4, after all products fitted.
        assert!(GroupConfig::try_from(request).is_err());
    }

    #[test]
    fn layers() {
        assert_eq!(LayerConfig::parse("layer_config", 8, 128).unwrap().alignment.tokens(), 128);
        assert_eq!(
            LayerConfig::parse("layer_config", 1, 0).unwrap().alignment,
            LayerConfig::parse("layer_config", 1, 1).unwrap().alignment
        );
        for top_k in [0, -1, 65] {
            let text = LayerConfig::parse("layer_config", top_k, 0).unwrap_err().to_string();
            assert_eq!(text, format!("layer_config.top_k must be 1 to 64 experts per token, got {top_k}"));
        }
        let wide = |limits| {
            let group = GroupConfig::of(GroupRequest { num_experts: 128, ..REQUEST }, limits).unwrap();
            LayerConfig::parse("layer_config", 33, 0).unwrap().check_against(&group)
        };
        wide(&limits::NATIVE).unwrap();
        assert_eq!(
            wide(&limits::NCCL_EP).unwrap_err().to_string(),
            "layer_config.top_k must be at most 32 experts per token with NCCL EP, got 33"
        );
        for alignment in [3, 12, 1 << 31, usize::MAX] {
            let text = LayerConfig::parse("layer_config", 2, alignment).unwrap_err().to_string();
            assert!(
                text.contains("dispatch_output_per_expert_alignment must be 0, 1 or another power of two"),
                "{text}"
            );
        }
        let group = GroupConfig::try_from(REQUEST).unwrap();
        LayerConfig::parse("layer_config", 16, 0).unwrap().check_against(&group).unwrap();
        let text = LayerConfig::parse("layer_config", 17, 0).unwrap().check_against(&group).unwrap_err().to_string();
        assert_eq!(text, "layer_config.top_k must be at most the group's num_experts, 16, got 17");
    }
}
