//! The recipe that dispatch applies itself: bf16 to e4m3, with an FP32 scale for each 128 values.

/// Values that share a scale.
pub const BLOCK: usize = 128;
/// Largest e4m3 value.
const MOST: f32 = 448.0;
/// What a block's largest magnitude is at least.
const LEAST: f32 = 1e-4;

/// Quantises a row of bf16 values. With `round` scales are powers of two.
pub fn quantise(row: &[u8], round: bool, values: &mut [u8], scales: &mut [u8]) {
    let blocks = row.chunks_exact(2 * BLOCK).zip(values.chunks_exact_mut(BLOCK));
    for ((given, values), there) in blocks.zip(scales.as_chunks_mut::<4>().0) {
        let given = given.as_chunks::<2>().0;
        let wide = || given.iter().map(|bytes| f32::from_bits(u32::from(u16::from_ne_bytes(*bytes)) << 16));
        // NaN counts for nothing, as in the kernel.
        let largest = wide().fold(LEAST, |most, value| most.max(value.abs()));
        let (scale, inverse) = scales_of(largest, round);
        for (there, value) in values.iter_mut().zip(wide()) {
            *there = to_e4m3(value * scale);
        }
        *there = inverse.to_ne_bytes();
    }
}

/// What values are multiplied by, and what a receiver multiplies them by.
fn scales_of(largest: f32, round: bool) -> (f32, f32) {
    let inverse = largest * (1.0 / MOST);
    if !round {
        return (MOST / largest, inverse);
    }
    // The exponent of the next power of two; normal, since `largest` has a least value.
    let bits = inverse.to_bits();
    let exponent = ((bits >> 23) & 0xff) + u32::from(bits & 0x7f_ffff != 0);
    (f32::from_bits((254 - exponent) << 23), f32::from_bits(exponent << 23))
}

/// Rounds to nearest even; what is too large becomes the largest value.
fn to_e4m3(value: f32) -> u8 {
    if value.is_nan() {
        return 0x7f;
    }
    let sign = (value.to_bits() >> 24) as u8 & 0x80;
    let magnitude = value.abs().min(MOST);
    // Steps of 2^-9 below the smallest normal number, 2^-6.
    if magnitude < 1.0 / 64.0 {
        return sign | (magnitude * 512.0).round_ties_even() as u8;
    }
    let bits = magnitude.to_bits();
    let rounded = (bits + 0x7_ffff + ((bits >> 20) & 1)) >> 20;
    // Exponents count from -7 rather than from -127.
    sign | (rounded - (120 << 3)) as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    /// The value of an e4m3 byte, as the format's definition says.
    fn value_of(byte: u8) -> f64 {
        let (exponent, fraction) = (i32::from((byte >> 3) & 15), f64::from(byte & 7));
        let magnitude = if exponent == 0 { fraction / 512.0 } else { (1.0 + fraction / 8.0) * 2f64.powi(exponent - 7) };
        if byte & 0x80 == 0 { magnitude } else { -magnitude }
    }

    #[test]
    fn every_value_and_every_tie_rounds_as_defined() {
        for byte in 0..0x7eu8 {
            let (low, high) = (value_of(byte), value_of(byte + 1));
            assert_eq!(to_e4m3(low as f32), byte);
            assert_eq!(to_e4m3(-low as f32), byte | 0x80);
            let middle = ((low + high) / 2.0) as f32;
            assert_eq!(to_e4m3(middle), byte + (byte & 1), "{middle} is between {low} and {high}");
            assert_eq!((to_e4m3(middle.next_down()), to_e4m3(middle.next_up())), (byte, byte + 1), "{middle}");
        }
        assert_eq!([449.0, 1e9, f32::INFINITY, -1e9].map(to_e4m3), [0x7e, 0x7e, 0x7e, 0xfe]);
        assert_eq!(to_e4m3(f32::NAN), 0x7f);
    }

    #[test]
    fn scales_are_of_the_largest_magnitude_or_the_next_power_of_two() {
        let row: Vec<u8> = (0..2 * BLOCK)
            .map(|i| if i < BLOCK { i as f32 - 100.0 } else { 0.0 })
            .flat_map(|value| bf16::from_f32(value).to_ne_bytes())
            .collect();
        let (mut values, mut scales) = (vec![0; 2 * BLOCK], [0; 8]);
        quantise(&row, false, &mut values, &mut scales);
        let read = |scales: &[u8; 8]| [0, 4].map(|at| f32::from_ne_bytes(scales[at..at + 4].try_into().unwrap()));
        assert_eq!(read(&scales), [100.0 * (1.0 / 448.0), 1e-4 * (1.0 / 448.0)]);
        assert_eq!((values[0], values[100], values[200]), (0xfe, 0, 0));
        quantise(&row, true, &mut values, &mut scales);
        assert_eq!(read(&scales), [0.25, 2f32.powi(-22)]);
        // -400 is between -384 and -416.
        assert_eq!(value_of(values[0]), -384.0);
        // A power of two stays itself.
        assert_eq!(scales_of(448.0, true), (1.0, 1.0));
        assert_eq!(scales_of(448.1, true), (0.5, 2.0));
    }
}
