//! What each engine takes of configurations and tensors. The rules in `config` and `ops` ask here, so that another engine can have
//! other limits.
#![forbid(unsafe_code)]

/// Most NVLink domains of a group of NCCL EP 0.1.0, which asserts beyond; the native engine works within one.
pub const DOMAINS: usize = 33;

/// NCCL EP 0.1.0 documents no more domains, and no more ranks of each of several.
pub const DOCUMENTED: usize = 8;

/// The limits of one engine.
#[derive(PartialEq, Eq)]
pub struct Limits {
    /// Its name in messages.
    pub name: &'static str,
    /// Most experts per token.
    pub top_k: u32,
    /// Most ranks.
    pub ranks: u32,
    /// Most experts of a group.
    pub experts: u32,
    /// Most experts that one rank owns.
    pub local_experts: u32,
    /// The number of experts of the group is a multiple of this.
    pub experts_multiple: u32,
    /// The engine is told a limit of tokens that is a multiple of this; a higher limit changes no result.
    pub tokens_multiple: u32,
    /// A row has a multiple of so many bytes, a power of two.
    pub row_bytes_multiple: usize,
    /// A row has a multiple of so many elements, a power of two.
    pub row_elements_multiple: usize,
    /// An MXFP8 row has a multiple of so many elements, since its scales move as a row of their own.
    pub mxfp8_elements_multiple: usize,
    /// Whether the gradient of dispatch takes no more rows in eager mode than the internal buffers hold.
    pub bounded_eager_gradient: bool,
    /// The limits of zero-copy groups.
    pub zero_copy: ZeroCopyLimits,
}

impl std::fmt::Debug for Limits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// The limits of zero-copy groups.
#[derive(Debug, PartialEq, Eq)]
pub struct ZeroCopyLimits {
    /// Most ranks.
    pub ranks: u32,
    /// Most receive rows.
    pub recv_rows: u32,
    /// Most rows of one token on one rank.
    pub duplicates: u32,
    /// Whether every rank owns a power of two of experts.
    pub power_of_two_experts: bool,
    /// Whether the capacity of groups that drop is a multiple of every layer's alignment.
    pub aligned_capacity: bool,
}

/// NCCL EP 0.1.0 in high-throughput mode, expert-major. Beyond these it aborts, throws, exits or writes out of bounds.
pub static NCCL_EP: Limits = Limits {
    name: "NCCL EP",
    // Its expert-major kernels are compiled with tables of these sizes.
    top_k: 32,
    ranks: u32::MAX,
    experts: u32::MAX,
    local_experts: 256,
    // It moves routing rows of 4 experts, and its tables of T * ranks entries by 16 bytes.
    experts_multiple: 4,
    tokens_multiple: 4,
    // Rows move by 16-byte copies, and the combine kernels take elements by 8.
    row_bytes_multiple: 16,
    row_elements_multiple: 8,
    mxfp8_elements_multiple: 512,
    // The backward kernels clear and fill as many staging rows as grad has, unchecked.
    bounded_eager_gradient: true,
    zero_copy: ZeroCopyLimits {
        // Its duplicate tables have this size, and number rows by 22 bits.
        ranks: 128,
        recv_rows: 1 << 22,
        // The kernel that sums them in place traps beyond.
        duplicates: 8,
        power_of_two_experts: true,
        // The kernel that clears the padding does not stop at the capacity.
        aligned_capacity: true,
    },
};

/// The native engine (`kernels/native/`).
pub static NATIVE: Limits = Limits {
    name: "the native engine",
    // A bit of a 64-bit word for each of a token's rows on a rank.
    top_k: 64,
    // Those of the largest NVLink domain; a token's ranks are bits of two words.
    ranks: 72,
    // Its shared memory for all counts, and exchanged indices have 16 bits.
    experts: 4096,
    local_experts: 4096,
    experts_multiple: 1,
    tokens_multiple: 1,
    // Rows move by 16-byte copies.
    row_bytes_multiple: 16,
    row_elements_multiple: 1,
    // A row of scales is a 16-byte copy too, of a byte for 32 elements.
    mxfp8_elements_multiple: 512,
    bounded_eager_gradient: false,
    zero_copy: ZeroCopyLimits {
        ranks: 72,
        recv_rows: (1 << 25) - 2,
        duplicates: 64,
        power_of_two_experts: false,
        aligned_capacity: false,
    },
};

const _: () = {
    assert!(NCCL_EP.row_bytes_multiple.is_power_of_two() && NCCL_EP.row_elements_multiple.is_power_of_two());
    assert!(NATIVE.row_bytes_multiple.is_power_of_two() && NATIVE.row_elements_multiple.is_power_of_two());
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_is_named_and_rows_have_25_bits_but_for_the_last_two() {
        assert_eq!((format!("{NCCL_EP:?}"), format!("{NATIVE:?}")), ("NCCL EP".into(), "the native engine".into()));
        assert_eq!(NATIVE.zero_copy.recv_rows, 33_554_430);
    }
}
