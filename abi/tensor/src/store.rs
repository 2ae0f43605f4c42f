//! The tensors, grouped tensors and quantization configurations of this process. What callers hold is no pointer but a slot
//! number with the slot's generation, so a value that was destroyed, copied past its life, made up, or is of another kind
//! is recognised and refused, also while other threads create and destroy.
#![forbid(unsafe_code)]
#![allow(non_upper_case_globals, reason = "C constant names in patterns")]

use crate::grouped::GroupedTensor;
use crate::quantization::QuantizationConfig;
use crate::value::Value;
use nvte_ep_core::dtype::DType;
use nvte_ep_core::error::{Error, Result};
use nvte_ep_core::ffi::types::{
    NVTE_DELAYED_TENSOR_SCALING, NVTE_INVALID_SCALING, NVTE_NVFP4_1D_SCALING, NVTEBasicTensor, NVTEDType,
    NVTEScalingMode, NVTEShape, NVTETensor, NVTETensorParam, kNVTEFloat32, kNVTENVFP4E4M3Max, kNVTENumTensorParams,
    kNVTERowScaledNVFP4, kNVTERowwiseData, kNVTEWithGEMMSwizzledScales,
};
use nvte_ep_core::ffi::view::ArrayRef;
use parking_lot::{RwLock, RwLockReadGuard};

/// An array: address, type, shape; the safe twin of [`NVTEBasicTensor`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Array {
    pub(crate) data: usize,
    pub(crate) dtype: NVTEDType,
    pub(crate) shape: NVTEShape,
}

impl Array {
    /// What a parameter is before it is set: no data, one dimension of size 0, float32.
    pub(crate) const BLANK: Self = Self { data: 0, dtype: kNVTEFloat32, shape: NVTEShape { data: [0; 15], ndim: 1 } };

    /// The array, if its numbers are what they may be.
    pub(crate) fn checked(self) -> Result<Self> {
        if self.shape.ndim > self.shape.data.len() {
            let required = format!("must have at most {} dimensions", self.shape.data.len());
            return Err(Error::argument("shape.ndim", required, self.shape.ndim));
        }
        if DType::from_nvte(self.dtype).is_none() {
            return Err(Error::argument("dtype", "must be an NVTEDType", self.dtype));
        }
        Ok(self)
    }

    /// Number of elements.
    pub(crate) fn numel(&self) -> Result<usize> {
        let sizes = &self.shape.data[..self.shape.ndim];
        if sizes.contains(&0) {
            return Ok(0);
        }
        sizes
            .iter()
            .try_fold(1usize, |product, size| product.checked_mul(*size))
            .ok_or_else(|| Error::argument("tensor", "must have a size that fits memory", format!("{sizes:?}")))
    }

    pub(crate) fn element_bits(&self) -> usize {
        DType::from_nvte(self.dtype).expect("checked when it was set").bits()
    }

    pub(crate) fn is_blank(&self) -> bool {
        self.data == 0 && *self == Self { dtype: self.dtype, ..Self::BLANK }
    }
}

impl From<NVTEBasicTensor> for Array {
    fn from(NVTEBasicTensor { data_ptr, dtype, shape }: NVTEBasicTensor) -> Self {
        Self { data: data_ptr.expose_provenance(), dtype, shape }
    }
}

impl<'a> From<&'a Array> for ArrayRef<'a> {
    #[inline]
    fn from(Array { data, dtype, shape }: &'a Array) -> Self {
        Self { data: *data as u64, dtype: *dtype, shape }
    }
}

impl From<Array> for NVTEBasicTensor {
    fn from(Array { data, dtype, shape }: Array) -> Self {
        Self { data_ptr: std::ptr::with_exposed_provenance_mut(data), dtype, shape }
    }
}

/// The parameters that are arrays, in the order of their C numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Param {
    RowwiseData,
    ColumnwiseData,
    Scale,
    Amax,
    RowwiseScaleInv,
    ColumnwiseScaleInv,
    ColumnwiseAmax,
}

const ARRAYS: [Param; 7] = [
    Param::RowwiseData,
    Param::ColumnwiseData,
    Param::Scale,
    Param::Amax,
    Param::RowwiseScaleInv,
    Param::ColumnwiseScaleInv,
    Param::ColumnwiseAmax,
];

/// A parameter by its C number: an array, or one of the three that are numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ParamKind {
    Array(Param),
    SwizzledScales,
    RowScaledNvfp4,
    Nvfp4E4m3Max,
}

impl ParamKind {
    pub(crate) fn parse(param: NVTETensorParam) -> Result<Self> {
        match param {
            kNVTEWithGEMMSwizzledScales => Ok(Self::SwizzledScales),
            kNVTERowScaledNVFP4 => Ok(Self::RowScaledNvfp4),
            kNVTENVFP4E4M3Max => Ok(Self::Nvfp4E4m3Max),
            _ => usize::try_from(param - kNVTERowwiseData)
                .ok()
                .and_then(|index| ARRAYS.get(index))
                .map(|array| Self::Array(*array))
                .ok_or_else(|| {
                    let required = format!("must be an NVTETensorParam, 0 to {}", kNVTENumTensorParams - 1);
                    Error::argument("param", required, param)
                }),
        }
    }

    /// The parameter's value in `tensor`.
    pub(crate) fn of(self, tensor: &Tensor) -> Value {
        match self {
            Self::Array(param) => Value::Array(tensor.array(param)),
            Self::SwizzledScales => Value::Flag(tensor.swizzled_scales),
            Self::RowScaledNvfp4 => Value::Flag(tensor.row_scaled_nvfp4),
            Self::Nvfp4E4m3Max => Value::Int(tensor.nvfp4_e4m3_max),
        }
    }

    /// Sets it to a value of its kind.
    pub(crate) fn set(self, tensor: &mut Tensor, value: Value) -> Result<()> {
        match (self, value) {
            (Self::Array(param), Value::Array(array)) => return tensor.set_array(param, array),
            (Self::SwizzledScales, Value::Flag(flag)) => tensor.swizzled_scales = flag,
            (Self::RowScaledNvfp4, Value::Flag(flag)) => tensor.row_scaled_nvfp4 = flag,
            (Self::Nvfp4E4m3Max, Value::Int(number)) => tensor.nvfp4_e4m3_max = number,
            _ => unreachable!("a value is read by its kind"),
        }
        Ok(())
    }
}

/// The scaling mode, if it is one.
pub(crate) fn checked_scaling_mode(scaling_mode: NVTEScalingMode) -> Result<NVTEScalingMode> {
    let known = NVTE_DELAYED_TENSOR_SCALING..=NVTE_NVFP4_1D_SCALING;
    if known.contains(&scaling_mode) || scaling_mode == NVTE_INVALID_SCALING {
        return Ok(scaling_mode);
    }
    Err(Error::argument("scaling_mode", "must be an NVTEScalingMode", scaling_mode))
}

/// One tensor.
#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    scaling_mode: NVTEScalingMode,
    arrays: [Array; ARRAYS.len()],
    swizzled_scales: bool,
    row_scaled_nvfp4: bool,
    nvfp4_e4m3_max: i32,
}

impl Tensor {
    /// A tensor that nothing was put into.
    pub(crate) fn new(scaling_mode: NVTEScalingMode) -> Result<Self> {
        Ok(Self { scaling_mode: checked_scaling_mode(scaling_mode)?, ..Self::NULL })
    }

    /// What reads of the null tensor see.
    pub(crate) const NULL: Self = Self {
        scaling_mode: NVTE_DELAYED_TENSOR_SCALING,
        arrays: [Array::BLANK; ARRAYS.len()],
        swizzled_scales: false,
        row_scaled_nvfp4: false,
        // The largest e4m3 value, which scales use unless told otherwise.
        nvfp4_e4m3_max: 448,
    };

    #[inline]
    pub(crate) const fn scaling_mode(&self) -> NVTEScalingMode {
        self.scaling_mode
    }

    pub(crate) fn array(&self, param: Param) -> Array {
        *self.array_ref(param)
    }

    #[inline]
    pub(crate) const fn array_ref(&self, param: Param) -> &Array {
        &self.arrays[param as usize]
    }

    pub(crate) fn set_array(&mut self, param: Param, array: Array) -> Result<()> {
        self.arrays[param as usize] = array.checked()?;
        Ok(())
    }

    /// The data that shape, type and size are asked of: row-wise, or column-wise where only that is set.
    pub(crate) fn main(&self) -> Array {
        let (rowwise, columnwise) = (self.array(Param::RowwiseData), self.array(Param::ColumnwiseData));
        if rowwise.is_blank() && !columnwise.is_blank() { columnwise } else { rowwise }
    }
}

/// What a slot holds. The rare kinds are boxed, so that they make no tensor larger.
#[allow(clippy::large_enum_variant, reason = "nearly all are tensors, which every call reads")]
pub(crate) enum Object {
    Tensor(Tensor),
    Grouped(Box<GroupedTensor>),
    Quantization(Box<QuantizationConfig>),
}

/// A kind of object that callers create, change and destroy.
pub(crate) trait Kind: Sized {
    /// The name of its argument in the C functions.
    const ARGUMENT: &'static str;
    /// What such an argument must be.
    const REQUIRED: &'static str;
    /// What it must not be, where NULL is refused.
    const NOT_NULL: &'static str;
    fn of(object: &Object) -> Option<&Self>;
    fn of_mut(object: &mut Object) -> Option<&mut Self>;
}

impl Kind for Tensor {
    const ARGUMENT: &'static str = "tensor";
    const REQUIRED: &'static str = "must be a live tensor of this library (nvte_create_tensor)";
    const NOT_NULL: &'static str = "must not be the null tensor";

    #[inline(always)]
    fn of(object: &Object) -> Option<&Self> {
        if let Object::Tensor(tensor) = object { Some(tensor) } else { None }
    }

    fn of_mut(object: &mut Object) -> Option<&mut Self> {
        if let Object::Tensor(tensor) = object { Some(tensor) } else { None }
    }
}

impl Kind for GroupedTensor {
    const ARGUMENT: &'static str = "tensor";
    const REQUIRED: &'static str = "must be a live grouped tensor of this library (nvte_create_grouped_tensor)";
    const NOT_NULL: &'static str = "must not be the null grouped tensor";

    fn of(object: &Object) -> Option<&Self> {
        if let Object::Grouped(grouped) = object { Some(grouped) } else { None }
    }

    fn of_mut(object: &mut Object) -> Option<&mut Self> {
        if let Object::Grouped(grouped) = object { Some(grouped) } else { None }
    }
}

impl Kind for QuantizationConfig {
    const ARGUMENT: &'static str = "config";
    const REQUIRED: &'static str =
        "must be a live quantization configuration of this library (nvte_create_quantization_config)";
    const NOT_NULL: &'static str = "must not be NULL";

    fn of(object: &Object) -> Option<&Self> {
        if let Object::Quantization(config) = object { Some(config) } else { None }
    }

    fn of_mut(object: &mut Object) -> Option<&mut Self> {
        if let Object::Quantization(config) = object { Some(config) } else { None }
    }
}

struct Slot {
    generation: u32,
    object: Option<Object>,
}

struct Store {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

static STORE: RwLock<Store> = RwLock::new(Store { slots: Vec::new(), free: Vec::new() });

/// Marks our values: TransformerEngine's are small numbers, so the two are told apart.
const TAG: usize = 0x4E45 << 48;
const INDEX_BITS: u32 = 24;
const MAX_SLOTS: usize = 1 << INDEX_BITS;
const GENERATION_MASK: u32 = (1 << (48 - INDEX_BITS)) - 1;

fn encode(index: u32, generation: u32) -> NVTETensor {
    std::ptr::without_provenance_mut(TAG | (generation as usize) << INDEX_BITS | index as usize)
}

#[cold]
fn dead<K: Kind>(value: NVTETensor) -> Error {
    Error::argument(K::ARGUMENT, K::REQUIRED, format!("{:#x}, destroyed before or never created", value.addr()))
}

/// A value's slot and generation, if it is one of ours at all.
#[inline(always)]
fn decode(tensor: NVTETensor) -> Option<(usize, u32)> {
    let value = tensor.addr();
    let is_ours = value & (0xFFFF << 48) == TAG;
    is_ours.then_some((value & (MAX_SLOTS - 1), (value >> INDEX_BITS) as u32 & GENERATION_MASK))
}

impl Store {
    #[inline(always)]
    fn get<K: Kind>(&self, value: NVTETensor) -> Option<&K> {
        let (index, generation) = decode(value)?;
        K::of(self.slots.get(index).filter(|slot| slot.generation == generation)?.object.as_ref()?)
    }

    fn index<K: Kind>(&self, value: NVTETensor) -> Result<usize> {
        match decode(value) {
            Some((index, _)) if self.get::<K>(value).is_some() => Ok(index),
            _ => Err(dead::<K>(value)),
        }
    }

    fn require_room(&self, count: usize) -> Result<()> {
        let room = self.free.len() + MAX_SLOTS - self.slots.len();
        if count <= room {
            return Ok(());
        }
        let required = format!("must be at most the tensors that there is room for, {room}");
        Err(Error::argument("N", required, count).with_remedy("destroy tensors that are not used any more"))
    }

    /// Memory for so many more objects, of which [`Self::require_room`] has seen that there may be so many. A store grows with
    /// what the program makes, so this is not left to the reserve.
    fn reserve(&mut self, count: usize) -> Result<()> {
        let more = count.saturating_sub(self.free.len());
        let bytes = (self.slots.len() + more) * size_of::<Slot>();
        let no_memory = |_| Error::OutOfMemory { what: format!("{count} more tensors"), bytes };
        self.slots.try_reserve(more).map_err(no_memory)?;
        // Destroying puts a slot's number here, and must not fail.
        self.free.try_reserve(self.slots.len() + more - self.free.len()).map_err(no_memory)
    }

    /// Puts an object where there is room and memory, which the caller made sure of.
    fn insert(&mut self, object: Object) -> NVTETensor {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, object: None });
            self.slots.len() as u32 - 1
        });
        let slot = &mut self.slots[index as usize];
        slot.generation += 1;
        slot.object = Some(object);
        encode(index, slot.generation)
    }

    fn remove<K: Kind>(&mut self, value: NVTETensor) -> Result<()> {
        let index = self.index::<K>(value)?;
        let slot = &mut self.slots[index];
        slot.object = None;
        // A slot whose generations are used up is given up, so that no old value ever fits again.
        if slot.generation < GENERATION_MASK {
            self.free.push(index as u32);
        }
        Ok(())
    }
}

/// New tensors, all or none.
pub(crate) fn create(scaling_mode: NVTEScalingMode, count: usize) -> Result<Vec<NVTETensor>> {
    let tensor = Tensor::new(scaling_mode)?;
    let mut store = STORE.write();
    store.require_room(count)?;
    store.reserve(count)?;
    let mut created = Vec::new();
    let no_memory = |_| Error::OutOfMemory { what: format!("{count} tensors"), bytes: count * size_of::<NVTETensor>() };
    created.try_reserve_exact(count).map_err(no_memory)?;
    created.extend((0..count).map(|_| store.insert(Object::Tensor(tensor.clone()))));
    Ok(created)
}

/// One new object.
pub(crate) fn create_object(object: Object) -> Result<NVTETensor> {
    let mut store = STORE.write();
    store.require_room(1)?;
    store.reserve(1)?;
    Ok(store.insert(object))
}

/// Destroys tensors; null ones are passed over. All or none: a dead one among them, or one that is named twice, is an
/// error, and the others stay.
pub(crate) fn destroy(tensors: &[NVTETensor]) -> Result<()> {
    let mut store = STORE.write();
    let live = || tensors.iter().copied().filter(|tensor| !tensor.is_null());
    let mut seen = std::collections::HashSet::new();
    let bytes = size_of_val(tensors);
    let no_memory = |_| Error::OutOfMemory { what: format!("{} tensors at once", tensors.len()), bytes };
    seen.try_reserve(if tensors.len() > 1 { tensors.len() } else { 0 }).map_err(no_memory)?;
    for tensor in live() {
        store.index::<Tensor>(tensor)?;
        if tensors.len() > 1 && !seen.insert(tensor) {
            return Err(dead::<Tensor>(tensor));
        }
    }
    live().for_each(|tensor| store.remove::<Tensor>(tensor).expect("looked up just now"));
    Ok(())
}

/// Destroys an object of kind `K`; the null one is accepted.
pub(crate) fn destroy_object<K: Kind>(value: NVTETensor) -> Result<()> {
    if value.is_null() { Ok(()) } else { STORE.write().remove::<K>(value) }
}

/// All tensors, as they are until this is dropped.
pub(crate) struct Reading(RwLockReadGuard<'static, Store>);

/// Who has this asks for no other: between two of one thread another thread may wait to write, and all three would wait
/// for each other.
#[inline]
pub(crate) fn reading() -> Reading {
    Reading(STORE.read())
}

impl Reading {
    /// An object; none for the null one.
    #[inline(always)]
    pub(crate) fn get<K: Kind>(&self, value: NVTETensor) -> Result<Option<&K>> {
        match self.0.get(value) {
            found @ Some(_) => Ok(found),
            None if value.is_null() => Ok(None),
            None => Err(dead::<K>(value)),
        }
    }
}

/// What `look` makes of the object; none for the null one.
pub(crate) fn read<K: Kind, R>(value: NVTETensor, look: impl FnOnce(&K) -> R) -> Result<Option<R>> {
    Ok(reading().get(value)?.map(look))
}

/// As [`read`], with the null tensor's defaults for the null tensor.
pub(crate) fn read_or_default<R>(tensor: NVTETensor, look: impl Fn(&Tensor) -> R) -> Result<R> {
    Ok(read(tensor, &look)?.unwrap_or_else(|| look(&Tensor::NULL)))
}

#[cold]
fn null<K: Kind>() -> Error {
    Error::argument(K::ARGUMENT, K::NOT_NULL, "NULL")
}

/// As [`read`], with an error for the null object.
pub(crate) fn read_live<K: Kind, R>(value: NVTETensor, look: impl FnOnce(&K) -> R) -> Result<R> {
    read(value, look)?.ok_or_else(null::<K>)
}

/// Changes an object.
pub(crate) fn change<K: Kind>(value: NVTETensor, change: impl FnOnce(&mut K) -> Result<()>) -> Result<()> {
    if value.is_null() {
        return Err(null::<K>());
    }
    let mut store = STORE.write();
    let index = store.index::<K>(value)?;
    change(store.slots[index].object.as_mut().and_then(K::of_mut).expect("index checked it"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one() -> NVTETensor {
        create(NVTE_DELAYED_TENSOR_SCALING, 1).unwrap()[0]
    }

    #[test]
    fn a_destroyed_value_stays_dead_when_its_slot_is_used_again() {
        let first = one();
        destroy(&[first]).unwrap();
        let text = destroy(&[first]).unwrap_err().to_string();
        assert!(text.starts_with("tensor must be a live tensor of this library"), "{text}");
        // Other tests take slots too, so look until this one's comes round.
        let again: Vec<_> = (0..64).map(|_| one()).collect();
        assert!(read(first, |_: &Tensor| ()).is_err());
        assert!(again.iter().all(|tensor| *tensor != first));
        destroy(&again).unwrap();
    }

    #[test]
    fn a_slot_is_given_up_before_its_values_come_round() {
        let mut store = Store { slots: vec![Slot { generation: GENERATION_MASK - 1, object: None }], free: vec![0] };
        let last = store.insert(Object::Tensor(Tensor::NULL));
        store.remove::<Tensor>(last).unwrap();
        assert!(store.free.is_empty());
        let next = store.insert(Object::Tensor(Tensor::NULL));
        assert_eq!((store.index::<Tensor>(next).unwrap(), store.index::<Tensor>(last).is_err()), (1, true));
    }

    #[test]
    fn more_tensors_than_there_is_room_for_are_refused_at_once() {
        for count in [MAX_SLOTS + 1, usize::MAX] {
            let text = create(NVTE_DELAYED_TENSOR_SCALING, count).unwrap_err().to_string();
            assert!(text.starts_with("N must be at most the tensors that there is room for"), "{text}");
        }
    }

    #[test]
    fn made_up_values_are_refused() {
        for value in [1usize, 2, TAG | 0xFF_FFFF, TAG, usize::MAX, 0x7FFF_0000_1000] {
            assert!(read(std::ptr::without_provenance_mut(value), |_: &Tensor| ()).is_err(), "{value:#x}");
        }
    }

    #[test]
    fn a_batch_is_destroyed_whole_or_not_at_all() {
        let (a, b) = (one(), one());
        assert!(destroy(&[a, b, a]).is_err());
        destroy(&[a, std::ptr::null_mut(), b]).unwrap();
        assert!(read(a, |_: &Tensor| ()).is_err() && read(b, |_: &Tensor| ()).is_err());
    }

    #[test]
    fn threads_do_not_meet() {
        std::thread::scope(|scope| {
            for thread in 0..4usize {
                scope.spawn(move || {
                    for round in 0..2000usize {
                        let tensor = one();
                        let data = thread * 10_000 + round;
                        change(tensor, |t: &mut Tensor| {
                            t.set_array(Param::RowwiseData, Array { data, ..Array::BLANK })
                        })
                        .unwrap();
                        assert_eq!(read(tensor, |t: &Tensor| t.array(Param::RowwiseData).data).unwrap(), Some(data));
                        destroy(&[tensor]).unwrap();
                    }
                });
            }
        });
    }

    #[test]
    fn parameters() {
        assert_eq!(ParamKind::parse(0).unwrap(), ParamKind::Array(Param::RowwiseData));
        assert_eq!(ParamKind::parse(6).unwrap(), ParamKind::Array(Param::ColumnwiseAmax));
        assert_eq!(ParamKind::parse(9).unwrap(), ParamKind::Nvfp4E4m3Max);
        for param in [-1, 10, i32::MAX] {
            assert!(ParamKind::parse(param).is_err());
        }
        for (index, param) in ARRAYS.iter().enumerate() {
            assert_eq!(*param as usize, index);
        }
    }
}
