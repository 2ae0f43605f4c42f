//! Validated configuration of low-latency groups.

use crate::dtype::DType;
use crate::error::{Error, Result};

/// What a caller asks a low-latency group to be, before it is checked; numbers as C gives them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are documented in the C headers under the same names")]
pub struct LlRequest {
    pub ep_size: i32,
    pub num_experts: i32,
    pub max_tokens_per_rank: i32,
    pub hidden_dim: i32,
    pub num_topk: i32,
    pub max_num_sms: i32,
    pub max_token_dtype: i32,
}

/// What a low-latency group is. NCCL EP (0.1.0) aborts, traps or writes out of bounds beyond these limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LlConfig {
    /// Number of ranks.
    pub ep_size: u32,
    /// Number of experts over all ranks.
    pub num_experts: u32,
    /// Most tokens a rank dispatches in one step.
    pub max_tokens_per_rank: u32,
    /// Elements of a token row, at most.
    pub hidden_dim: u32,
    /// Most experts per token.
    pub num_topk: u32,
    /// Streaming multiprocessors for communication; none = all that a rank has.
    pub max_num_sms: Option<u32>,
    /// Widest data type of a token.
    pub max_token_dtype: DType,
}

/// Elements that a row is a multiple of: combine's kernel has a slot of a row and 4 bytes for each 128 elements, which is copied in
/// units of 16 bytes, and sums 512 elements of 16 bits at once; rows with scales are copied in such units too. Dispatch alone would
/// take half of it in 16 bits and a quarter in 32.
pub(crate) const LL_ELEMENTS: usize = 512;
/// The kernel that receives in combine has a warp for each so many bytes of a row, and one more, of 32.
const MOST_ROW_BYTES: usize = 31 * 1024;
/// A warp of a block takes a token's row and one each of its experts, of 32.
const MOST_TOP_K: u32 = 31;
/// Experts travel as numbers of 16 bits.
const MOST_EXPERTS: u32 = u16::MAX as u32;
/// Groups of warps that a block has at most, one for each of its experts.
const MOST_WARP_GROUPS: u32 = 14;
/// Warps of a block.
const WARPS: u32 = 32;

fn field(name: &str) -> String {
    format!("config->{name}")
}

/// The types of tokens, of which a group's widest is one.
pub(crate) const LL_DTYPES: [DType; 3] = [DType::BFloat16, DType::Float16, DType::Float32];

impl TryFrom<LlRequest> for LlConfig {
    type Error = Error;

    fn try_from(request: LlRequest) -> Result<Self> {
        let LlRequest { ep_size, num_experts, max_tokens_per_rank, hidden_dim, num_topk, max_num_sms, max_token_dtype } =
            request;
        let positive = |name: &str, value: i32| {
            let found = u32::try_from(value).ok().filter(|value| *value > 0);
            found.ok_or_else(|| Error::argument(field(name), "must be greater than 0", value))
        };
        let max_num_sms = u32::try_from(max_num_sms)
            .map_err(|_| Error::argument(field("max_num_sms"), "must be 0 (automatic) or more", max_num_sms))?;
        let dtype = match max_token_dtype {
            0 => DType::BFloat16,
            code => DType::from_nvte(code).filter(|dtype| LL_DTYPES.contains(dtype)).ok_or_else(|| {
                let rule = "must be the NVTEDType of the widest token: bfloat16, float16 or float32 (0 = BFloat16)";
                Error::argument(field("max_token_dtype"), rule, code)
            })?,
        };
        let config = Self {
            ep_size: positive("ep_size", ep_size)?,
            num_experts: positive("num_experts", num_experts)?,
            max_tokens_per_rank: positive("max_tokens_per_rank", max_tokens_per_rank)?,
            hidden_dim: positive("hidden_dim", hidden_dim)?,
            num_topk: positive("num_topk", num_topk)?,
            max_num_sms: (max_num_sms > 0).then_some(max_num_sms),
            max_token_dtype: dtype,
        };
        config.check()?;
        Ok(config)
    }
}

impl LlConfig {
    /// Experts that one rank owns.
    #[must_use]
    pub const fn local_experts(&self) -> u32 {
        self.num_experts / self.ep_size
    }

    /// Bytes of the longest token row.
    #[must_use]
    pub const fn max_token_bytes(&self) -> usize {
        self.max_token_dtype.bytes(self.hidden_dim as usize)
    }

    /// Rows of one expert's slab: the tokens of all ranks.
    #[must_use]
    pub const fn slab_rows(&self) -> usize {
        self.ep_size as usize * self.max_tokens_per_rank as usize
    }

    /// The rules between fields.
    fn check(&self) -> Result<()> {
        if !self.num_experts.is_multiple_of(self.ep_size) {
            let required = format!("must be a multiple of ep_size, {}", self.ep_size);
            return Err(Error::argument(field("num_experts"), required, self.num_experts)
                .with_remedy("change num_experts, or start another number of ranks"));
        }
        if !(2..=MOST_EXPERTS).contains(&self.num_experts) {
            let required = format!("must be 2 to {MOST_EXPERTS} in low-latency groups");
            return Err(Error::argument(field("num_experts"), required, self.num_experts));
        }
        let most = MOST_TOP_K.min(self.num_experts);
        if self.num_topk > most {
            let required = format!("must be at most {most} experts per token in low-latency groups");
            return Err(Error::argument(field("num_topk"), required, self.num_topk));
        }
        let bytes = self.max_token_bytes();
        if !(self.hidden_dim as usize).is_multiple_of(LL_ELEMENTS) || bytes > MOST_ROW_BYTES {
            let required = format!(
                "must be a multiple of {LL_ELEMENTS} elements, at most {MOST_ROW_BYTES} bytes in {}",
                self.max_token_dtype
            );
            let found = format!("{} elements = {bytes} bytes", self.hidden_dim);
            return Err(Error::argument(field("hidden_dim"), required, found));
        }
        if i32::try_from(self.slab_rows()).is_err() {
            let required = "must make ep_size * max_tokens_per_rank fit 31 bits";
            return Err(Error::argument(field("max_tokens_per_rank"), required, self.max_tokens_per_rank));
        }
        Ok(())
    }

    /// The rules of the launch on `sms` multiprocessors, which are the same on every rank.
    ///
    /// # Errors
    /// Too few for the experts, or for the experts of a token.
    pub fn check_launch(&self, sms: u32) -> Result<()> {
        let groups = self.num_experts.div_ceil(sms);
        // With one expert a rank, the last group of the largest block writes beyond its table.
        let most = MOST_WARP_GROUPS - u32::from(self.local_experts() == 1);
        if groups > most || self.num_experts.div_ceil(groups) < 2 {
            let needed = self.num_experts.div_ceil(most).max(2);
            let required =
                format!("must give a rank at least {needed} multiprocessors for {} experts", self.num_experts);
            return Err(Error::argument(field("max_num_sms"), required, sms)
                .with_remedy("raise it, or let fewer ranks share a device"));
        }
        let warps = WARPS / groups;
        if self.num_topk >= warps {
            let required = format!(
                "must be at most {} with {} experts on {sms} multiprocessors, which leave {warps} warps for an expert",
                warps - 1,
                self.num_experts
            );
            return Err(Error::argument(field("num_topk"), required, self.num_topk)
                .with_remedy("lower it, raise max_num_sms, or let fewer ranks share a device"));
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) const LL_REQUEST: LlRequest = LlRequest {
        ep_size: 4,
        num_experts: 16,
        max_tokens_per_rank: 64,
        hidden_dim: 512,
        num_topk: 8,
        max_num_sms: 0,
        max_token_dtype: 0,
    };

    fn text(request: LlRequest) -> String {
        LlConfig::try_from(request).unwrap_err().to_string()
    }

    #[test]
    fn a_valid_request() {
        let config = LlConfig::try_from(LL_REQUEST).unwrap();
        assert_eq!((config.local_experts(), config.slab_rows(), config.max_token_bytes()), (4, 256, 1024));
        assert_eq!((config.max_token_dtype, config.max_num_sms), (DType::BFloat16, None));
        let float = LlRequest { max_token_dtype: DType::Float32.nvte(), hidden_dim: 7680, ..LL_REQUEST };
        assert_eq!(LlConfig::try_from(float).unwrap().max_token_bytes(), 30 * 1024);
        let widest = LlRequest { hidden_dim: 15_872, ..LL_REQUEST };
        assert_eq!(LlConfig::try_from(widest).unwrap().max_token_bytes(), MOST_ROW_BYTES);
    }

    #[test]
    fn every_rule_has_its_text() {
        for (request, expected) in [
            (LlRequest { ep_size: 0, ..LL_REQUEST }, "config->ep_size must be greater than 0, got 0"),
            (LlRequest { num_topk: -1, ..LL_REQUEST }, "config->num_topk must be greater than 0, got -1"),
            (
                LlRequest { num_experts: 18, ..LL_REQUEST },
                "config->num_experts must be a multiple of ep_size, 4, got 18; change num_experts, or start another number of ranks",
            ),
            (
                LlRequest { num_experts: 65_536, ..LL_REQUEST },
                "config->num_experts must be 2 to 65535 in low-latency groups, got 65536",
            ),
            (
                LlRequest { ep_size: 1, num_experts: 1, num_topk: 1, ..LL_REQUEST },
                "config->num_experts must be 2 to 65535 in low-latency groups, got 1",
            ),
            (
                LlRequest { num_topk: 17, ..LL_REQUEST },
                "config->num_topk must be at most 16 experts per token in low-latency groups, got 17",
            ),
            (
                LlRequest { num_topk: 32, num_experts: 64, ..LL_REQUEST },
                "config->num_topk must be at most 31 experts per token in low-latency groups, got 32",
            ),
            (LlRequest { max_num_sms: -1, ..LL_REQUEST }, "config->max_num_sms must be 0 (automatic) or more, got -1"),
            (
                LlRequest { max_token_dtype: DType::Float8E4M3.nvte(), ..LL_REQUEST },
                "config->max_token_dtype must be the NVTEDType of the widest token: bfloat16, float16 or float32 \
                 (0 = BFloat16), got 7",
            ),
            (
                LlRequest { hidden_dim: 768, ..LL_REQUEST },
                "config->hidden_dim must be a multiple of 512 elements, at most 31744 bytes in bfloat16, \
                 got 768 elements = 1536 bytes",
            ),
            (
                LlRequest { hidden_dim: 16_384, ..LL_REQUEST },
                "config->hidden_dim must be a multiple of 512 elements, at most 31744 bytes in bfloat16, \
                 got 16384 elements = 32768 bytes",
            ),
            (
                LlRequest { max_tokens_per_rank: 1 << 30, ..LL_REQUEST },
                "config->max_tokens_per_rank must make ep_size * max_tokens_per_rank fit 31 bits, got 1073741824",
            ),
        ] {
            assert_eq!(text(request), expected);
        }
    }

    #[test]
    fn launches_fit_the_multiprocessors() {
        let of = |num_experts, num_topk, ep_size| {
            LlConfig::try_from(LlRequest { num_experts, num_topk, ep_size, ..LL_REQUEST }).unwrap()
        };
        of(256, 8, 4).check_launch(132).unwrap();
        // 19 multiprocessors are 14 groups of 2 warps.
        of(256, 1, 4).check_launch(19).unwrap();
        let text = |config: LlConfig, sms| config.check_launch(sms).unwrap_err().to_string();
        assert_eq!(
            text(of(256, 1, 4), 18),
            "config->max_num_sms must give a rank at least 19 multiprocessors for 256 experts, got 18; raise it, or let \
             fewer ranks share a device"
        );
        assert_eq!(
            text(of(256, 8, 4), 64),
            "config->num_topk must be at most 7 with 256 experts on 64 multiprocessors, which leave 8 warps for an \
             expert, got 8; lower it, raise max_num_sms, or let fewer ranks share a device"
        );
        // One block alone would wait for others.
        assert!(text(of(2, 2, 1), 1).contains("at least 2 multiprocessors for 2 experts, got 1"));
        let one_each = |sms| of(56, 1, 56).check_launch(sms);
        assert!(one_each(4).is_err() && one_each(5).is_ok(), "14 groups with one expert a rank");
    }
}
