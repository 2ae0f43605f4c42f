//! Element types.

#[doc(inline)]
pub use nvte_ep_core::dtype::DType;

/// A type that device memory holds.
///
/// # Safety
/// Values have the size and the format of `DTYPE`.
pub unsafe trait Element: Copy + 'static {
    /// Its data type.
    const DTYPE: DType;
}

/// An element of token rows.
pub trait Token: Element {}

/// A type of expert indices: `i64` or `i32`; also of counts.
pub trait Index: Element {}

/// A type of 8-bit token rows, which may come with scales (MXFP8).
pub trait Scaled: Token {}

macro_rules! elements {
    ($($Type:ty = $dtype:ident $(: $($Trait:ident),+)?;)*) => { $(
        // SAFETY: the type has the format's size and bits.
        unsafe impl Element for $Type {
            const DTYPE: DType = DType::$dtype;
        }
        $($( impl $Trait for $Type {} )+)?
    )* };
}

macro_rules! formats {
    ($($(#[$meta:meta])* $Name:ident($Bits:ty);)*) => { $(
        $(#[$meta])*
        #[repr(transparent)]
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct $Name(pub $Bits);

        #[cfg(feature = "cudarc")]
        // SAFETY: a number of the device's size, transparently.
        unsafe impl cudarc::driver::DeviceRepr for $Name {}
        #[cfg(feature = "cudarc")]
        // SAFETY: all bits may be zero.
        unsafe impl cudarc::driver::ValidAsZeroBits for $Name {}
    )* };
}

formats! {
    /// The bits of a bfloat16, for programs without the crate `half`.
    BFloat16(u16);
    /// The bits of an IEEE binary16, for programs without the crate `half`.
    Float16(u16);
    /// The bits of an FP8 of 4 exponent and 3 mantissa bits.
    Float8E4M3(u8);
    /// The bits of an FP8 of 5 exponent and 2 mantissa bits.
    Float8E5M2(u8);
    /// The bits of a scale: a power of two.
    Float8E8M0(u8);
}

elements! {
    u8 = Byte;
    i32 = Int32: Index;
    i64 = Int64: Index;
    f32 = Float32: Token;
    BFloat16 = BFloat16: Token;
    Float16 = Float16: Token;
    Float8E4M3 = Float8E4M3: Token, Scaled;
    Float8E5M2 = Float8E5M2: Token, Scaled;
    Float8E8M0 = Float8E8M0;
}

#[cfg(feature = "half")]
elements! {
    half::bf16 = BFloat16: Token;
    half::f16 = Float16: Token;
}
