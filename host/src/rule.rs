//! The rules of the contract: what a GPU makes of a breach, and what a breach is here.

use std::fmt;

/// What a GPU does on a breach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnGpu {
    /// The process ends.
    Abort,
    /// Kernels fault or trap, and the context is lost.
    Trap,
    /// Ranks wait for ever.
    Hang,
    /// Memory of others is read or written.
    Corrupt,
    /// Results are wrong and nothing says so.
    SilentlyWrong,
    /// The call fails, and what was being captured is lost.
    CaptureLost,
    /// The call fails.
    Refused,
}

impl fmt::Display for OnGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Abort => "abort",
            Self::Trap => "trap",
            Self::Hang => "hang",
            Self::Corrupt => "corrupt memory",
            Self::SilentlyWrong => "silently wrong",
            Self::CaptureLost => "capture lost",
            Self::Refused => "refused",
        })
    }
}

/// What a breach of a rule is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// An error: the work cannot go on.
    Error,
    /// What the [`Policy`](crate::settings::Policy) says.
    Policy,
    /// A warning, unless the policy is off: programs that do it work on GPUs.
    Warning,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Error => "an error",
            Self::Policy => "an error, or as set",
            Self::Warning => "a warning",
        })
    }
}

macro_rules! rules {
    ($($rule:ident $name:literal $on_gpu:ident $after:ident $sentence:literal;)*) => {
        /// The rules.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Rule {
            $(#[doc = $sentence] $rule,)*
        }

        impl Rule {
            /// Every rule.
            pub const ALL: &'static [Rule] = &[$(Rule::$rule),*];

            /// Its name in reports.
            pub fn name(self) -> &'static str {
                match self { $(Rule::$rule => $name,)* }
            }

            /// What has to hold.
            pub fn sentence(self) -> &'static str {
                match self { $(Rule::$rule => $sentence,)* }
            }

            /// What a GPU does on a breach.
            pub fn on_gpu(self) -> OnGpu {
                match self { $(Rule::$rule => OnGpu::$on_gpu,)* }
            }

            /// What a breach is.
            pub fn severity(self) -> Severity {
                match self { $(Rule::$rule => Severity::$after,)* }
            }

            /// Whether the work can go on after a breach.
            pub fn recoverable(self) -> bool {
                self.severity() != Severity::Error
            }
        }
    };
}

rules! {
    ConfigDiffers "config-differs" Hang Error "all ranks give the same number of ranks and the same configuration";
    UniqueId "unique-id" Hang Error "a unique id makes one communicator, with each rank once";
    RankDevice "rank-device" Refused Error "the ranks of a communicator are on different devices";
    InsideGroup "inside-group" Hang Error "EP groups are created, and handles updated, outside ncclGroupStart and ncclGroupEnd";
    CallOrder "call-order" Hang Error "all ranks enter the same calls in the same order, with arguments that agree";
    MissingRank "missing-rank" Hang Error "every rank takes part in every collective call";
    ReplayCount "replay-count" Hang Error "all ranks replay a captured graph equally often";
    ArgumentValue "argument-value" Abort Error "arguments have values that their function takes";
    TensorShape "tensor-shape" Abort Error "a tensor has the dimensions, the length and the type that its function asks for";
    RowLimit "row-limit" Corrupt Error "tokens and their rows stay within the limits that the group was created with";
    ReceiveOverflow "receive-overflow" Trap Error "with the policy TRAP no rank receives more rows than max_recv_tokens_per_rank";
    ExpertIndex "expert-index" Corrupt Error "an index names one of num_experts experts or is negative";
    RoutingChanged "routing-changed" SilentlyWrong Policy "a combine uses the routing of the dispatch before it, forward and backward, and gradients that of a forward pass";
    CombineRows "combine-rows" Trap Error "combine is given all rows that the routing uses";
    HandleMemory "handle-memory" Corrupt Error "handle_mem holds what UpdateHandle wrote for the tokens at hand";
    Alignment "alignment" Trap Error "memory, and its offset in a window, start at a multiple of 16 bytes and of the element";
    MemoryBounds "memory-bounds" Corrupt Error "a tensor lies inside one allocation";
    FreedMemory "freed-memory" Corrupt Error "memory stays allocated while a tensor, a handle or a graph uses it";
    DeviceMemory "device-memory" Trap Policy "a tensor lies in device or pinned memory of CUDA or NCCL";
    OtherDevice "other-device" Trap Policy "memory and streams belong to the device of the communicator";
    UnwrittenMemory "unwritten-memory" SilentlyWrong Policy "what an operation reads has been written";
    WindowMissing "window-missing" Corrupt Error "with zero_copy ON the tensors that peers touch lie in symmetric windows of the group's communicator";
    WindowBounds "window-bounds" Corrupt Error "a window lies inside its allocation, page-aligned, and a tensor inside its window";
    WindowLifetime "window-lifetime" Corrupt Policy "a window stays registered while operations use it, and its memory allocated until then";
    StreamOrder "stream-order" Corrupt Policy "operations of a group on several streams are ordered by events or waits";
    OneThread "one-thread" Corrupt Policy "a group and its handles are used by one thread at a time";
    LiveHandles "live-handles" Corrupt Policy "handles are destroyed before their group, groups before their communicator";
    PeersBusy "peers-busy" Corrupt Warning "a group is destroyed after all ranks have finished its operations";
    DestroyedObject "destroyed-object" Corrupt Error "communicators, groups and handles are not used after they are destroyed";
    StagedOperation "staged-operation" Trap Error "a low-latency group has one staged operation at a time, and ncclEpComplete ends it before anything else";
    StagedTensors "staged-tensors" Corrupt Error "descriptors of a staged operation give data, and stay as they are until ncclEpComplete";
    StagedStream "staged-stream" SilentlyWrong Policy "ncclEpComplete is given the stream of the operation that it ends";
    DispatchFirst "dispatch-first" Corrupt Error "a low-latency combine follows a dispatch over its handle_mem";
    SlabOverflow "slab-overflow" Corrupt Error "no expert receives more rows than ranks x max_dispatch_tokens_per_rank in low-latency mode";
    BufferGrowth "buffer-growth" Corrupt Error "with rdma_buffer_size 0 no staged operation or graph needs the buffer that ncclEpInitHandle replaces";
    CaptureUnsafe "capture-unsafe" CaptureLost Error "nothing allocates, frees or waits while a stream is captured";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_rules_are_unique() {
        for (index, rule) in Rule::ALL.iter().enumerate() {
            assert_eq!(*rule as usize, index);
            assert!(Rule::ALL[..index].iter().all(|other| other.name() != rule.name()), "{}", rule.name());
        }
    }
}
