//! Quantization configurations. Expert parallelism takes none; they are kept and given back, for programs that are compiled
//! against TransformerEngine's headers and bind all of their functions.

use crate::store::{self, Object};
use crate::value::Value;
use nvte_ep_core::error::{Error, Result};
use nvte_ep_core::ffi::types::{
    NVTEQuantizationConfig, NVTEQuantizationConfigAttribute, kNVTENVFP44Over6MinMSE,
    kNVTEQuantizationConfigNVFP44Over6Mode, kNVTEQuantizationConfigNumAttributes,
};
use std::ffi::c_void;

/// The attributes, in the order of their C numbers.
#[derive(Debug, Clone)]
pub(crate) struct QuantizationConfig([Value; ATTRIBUTES]);

const ATTRIBUTES: usize = kNVTEQuantizationConfigNumAttributes as usize;

/// What they are before they are set.
const UNSET: [Value; ATTRIBUTES] = [
    Value::Flag(false), // ForcePow2Scales
    Value::Float(0.0),  // AmaxEpsilon
    Value::Handle(0),   // NoopTensor
    Value::Int(0),      // Float8BlockScaleTensorFormat
    Value::Handle(0),   // RNGState
    Value::Flag(false), // NVFP42DQuantization
    Value::Flag(false), // StochasticRounding
    Value::Flag(false), // UseFastMath
    Value::Byte(0),     // NVFP44Over6Mode
    Value::Flag(false), // NVFP44Over6ErrUseFastMath
    Value::Flag(false), // MXFP82DQuantization
];

/// An attribute's place in the list.
fn parse(attr: NVTEQuantizationConfigAttribute) -> Result<usize> {
    usize::try_from(attr).ok().filter(|index| *index < ATTRIBUTES).ok_or_else(|| {
        let required = format!("must be an NVTEQuantizationConfigAttribute, 0 to {}", ATTRIBUTES - 1);
        Error::argument("attr", required, attr)
    })
}

/// Creates a quantization configuration, every attribute 0. Destroy it with nvte_destroy_quantization_config.
pub(crate) fn nvte_create_quantization_config() -> Result<NVTEQuantizationConfig> {
    store::create_object(Object::Quantization(Box::new(QuantizationConfig(UNSET))))
}

/// Sets an attribute of a quantization configuration.
///
/// buf, size_in_bytes: the value, of the type that the attribute's description says. The size may be larger.
/// Throws for NULL, an unknown attribute, a NULL or short buffer, a value that is no NVTENVFP44Over6Mode where one is asked
/// for.
///
/// # Safety
/// buf points to size_in_bytes readable bytes.
pub(crate) unsafe fn nvte_set_quantization_config_attribute(
    config: NVTEQuantizationConfig,
    attr: NVTEQuantizationConfigAttribute,
    buf: *const c_void,
    size_in_bytes: usize,
) -> Result<()> {
    let index = parse(attr)?;
    // SAFETY: the caller vouches for the buffer.
    let value = unsafe { UNSET[index].read(buf, size_in_bytes) }?;
    match value {
        Value::Byte(mode)
            if attr == kNVTEQuantizationConfigNVFP44Over6Mode && i32::from(mode) > kNVTENVFP44Over6MinMSE =>
        {
            Err(Error::argument("buf", "must hold an NVTENVFP44Over6Mode, 0 to 2", mode))
        }
        _ => store::change(config, |config: &mut QuantizationConfig| {
            config.0[index] = value;
            Ok(())
        }),
    }
}

/// Gets an attribute of a quantization configuration.
///
/// buf, size_in_bytes: room for the value. With buf NULL nothing is written but size_written.
/// size_written: receives the value's size in bytes; may be NULL.
/// Throws for NULL, an unknown attribute and a short buffer.
///
/// # Safety
/// buf is NULL or points to size_in_bytes writable bytes; size_written is NULL or points to a size_t.
pub(crate) unsafe fn nvte_get_quantization_config_attribute(
    config: NVTEQuantizationConfig,
    attr: NVTEQuantizationConfigAttribute,
    buf: *mut c_void,
    size_in_bytes: usize,
    size_written: *mut usize,
) -> Result<()> {
    let index = parse(attr)?;
    let value = store::read_live(config, |config: &QuantizationConfig| config.0[index])?;
    // SAFETY: the caller vouches for the buffer and the pointer.
    unsafe { value.give(buf, size_in_bytes, size_written) }
}

/// Destroys a quantization configuration; NULL is accepted.
///
/// Throws for a configuration that is not alive.
pub(crate) fn nvte_destroy_quantization_config(config: NVTEQuantizationConfig) -> Result<()> {
    store::destroy_object::<QuantizationConfig>(config)
}
