//! The tensors of this process. An NVTETensor is no pointer but a slot number with the slot's generation, so a value that
//! was destroyed, copied past its life or made up is recognised and refused, also while other threads create and destroy.
#![forbid(unsafe_code)]
#![allow(non_upper_case_globals, reason = "C constant names in patterns")]

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
    const BLANK: Self = Self { data: 0, dtype: kNVTEFloat32, shape: NVTEShape { data: [0; 15], ndim: 1 } };

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
        DType::from_nvte(self.dtype).expect("set_array checked it").bits()
    }

    fn is_blank(&self) -> bool {
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
}

/// One tensor.
#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    scaling_mode: NVTEScalingMode,
    arrays: [Array; ARRAYS.len()],
    pub(crate) swizzled_scales: bool,
    pub(crate) row_scaled_nvfp4: bool,
    pub(crate) nvfp4_e4m3_max: i32,
}

impl Tensor {
    /// A tensor that nothing was put into.
    pub(crate) fn new(scaling_mode: NVTEScalingMode) -> Result<Self> {
        let known = NVTE_DELAYED_TENSOR_SCALING..=NVTE_NVFP4_1D_SCALING;
        if !known.contains(&scaling_mode) && scaling_mode != NVTE_INVALID_SCALING {
            return Err(Error::argument("scaling_mode", "must be an NVTEScalingMode", scaling_mode));
        }
        Ok(Self { scaling_mode, ..Self::NULL })
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
        if array.shape.ndim > array.shape.data.len() {
            let required = format!("must have at most {} dimensions", array.shape.data.len());
            return Err(Error::argument("shape.ndim", required, array.shape.ndim));
        }
        if DType::from_nvte(array.dtype).is_none() {
            return Err(Error::argument("dtype", "must be an NVTEDType", array.dtype));
        }
        self.arrays[param as usize] = array;
        Ok(())
    }

    /// The data that shape, type and size are asked of: row-wise, or column-wise where only that is set.
    pub(crate) fn main(&self) -> Array {
        let (rowwise, columnwise) = (self.array(Param::RowwiseData), self.array(Param::ColumnwiseData));
        if rowwise.is_blank() && !columnwise.is_blank() { columnwise } else { rowwise }
    }
}

struct Slot {
    generation: u32,
    tensor: Option<Tensor>,
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
fn dead(tensor: NVTETensor) -> Error {
    let required = "must be a live tensor of this library (nvte_create_tensor)";
    Error::argument("tensor", required, format!("{:#x}, destroyed before or never created", tensor.addr()))
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
    fn get(&self, tensor: NVTETensor) -> Option<&Tensor> {
        let (index, generation) = decode(tensor)?;
        self.slots.get(index).filter(|slot| slot.generation == generation)?.tensor.as_ref()
    }

    fn index(&self, tensor: NVTETensor) -> Result<usize> {
        match decode(tensor) {
            Some((index, _)) if self.get(tensor).is_some() => Ok(index),
            _ => Err(dead(tensor)),
        }
    }

    /// Puts a tensor where there is room, which the caller made sure of.
    fn insert(&mut self, tensor: Tensor) -> NVTETensor {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, tensor: None });
            self.slots.len() as u32 - 1
        });
        let slot = &mut self.slots[index as usize];
        slot.generation += 1;
        slot.tensor = Some(tensor);
        encode(index, slot.generation)
    }

    fn remove(&mut self, tensor: NVTETensor) -> Result<()> {
        let index = self.index(tensor)?;
        let slot = &mut self.slots[index];
        slot.tensor = None;
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
    let room = store.free.len() + MAX_SLOTS - store.slots.len();
    if count > room {
        let required = format!("must be at most the tensors that there is room for, {room}");
        return Err(Error::argument("N", required, count).with_remedy("destroy tensors that are not used any more"));
    }
    Ok((0..count).map(|_| store.insert(tensor.clone())).collect())
}

/// Destroys tensors; null ones are passed over. All or none: a dead one among them, or one that is named twice, is an
/// error, and the others stay.
pub(crate) fn destroy(tensors: &[NVTETensor]) -> Result<()> {
    let mut store = STORE.write();
    let live = || tensors.iter().copied().filter(|tensor| !tensor.is_null());
    let mut seen = std::collections::HashSet::new();
    for tensor in live() {
        store.index(tensor)?;
        if tensors.len() > 1 && !seen.insert(tensor) {
            return Err(dead(tensor));
        }
    }
    live().for_each(|tensor| store.remove(tensor).expect("looked up just now"));
    Ok(())
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
    /// A tensor; none for the null tensor.
    #[inline(always)]
    pub(crate) fn get(&self, tensor: NVTETensor) -> Result<Option<&Tensor>> {
        match self.0.get(tensor) {
            found @ Some(_) => Ok(found),
            None if tensor.is_null() => Ok(None),
            None => Err(dead(tensor)),
        }
    }
}

/// What `look` makes of `tensor`; none for the null tensor.
pub(crate) fn read<R>(tensor: NVTETensor, look: impl FnOnce(&Tensor) -> R) -> Result<Option<R>> {
    Ok(reading().get(tensor)?.map(look))
}

/// As [`read`], with the null tensor's defaults for the null tensor.
pub(crate) fn read_or_default<R>(tensor: NVTETensor, look: impl Fn(&Tensor) -> R) -> Result<R> {
    Ok(read(tensor, &look)?.unwrap_or_else(|| look(&Tensor::NULL)))
}

/// As [`read`], with an error for the null tensor.
pub(crate) fn read_live<R>(tensor: NVTETensor, look: impl FnOnce(&Tensor) -> R) -> Result<R> {
    read(tensor, look)?.ok_or_else(|| Error::argument("tensor", "must not be the null tensor", "NULL"))
}

/// Changes `tensor`.
pub(crate) fn change(tensor: NVTETensor, change: impl FnOnce(&mut Tensor) -> Result<()>) -> Result<()> {
    if tensor.is_null() {
        return Err(Error::argument("tensor", "must not be the null tensor", "NULL"));
    }
    let mut store = STORE.write();
    let index = store.index(tensor)?;
    change(store.slots[index].tensor.as_mut().expect("index checked it"))
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
        assert!(read(first, |_| ()).is_err());
        assert!(again.iter().all(|tensor| *tensor != first));
        destroy(&again).unwrap();
    }

    #[test]
    fn a_slot_is_given_up_before_its_values_come_round() {
        let mut store = Store { slots: vec![Slot { generation: GENERATION_MASK - 1, tensor: None }], free: vec![0] };
        let last = store.insert(Tensor::NULL);
        store.remove(last).unwrap();
        assert!(store.free.is_empty());
        let next = store.insert(Tensor::NULL);
        assert_eq!((store.index(next).unwrap(), store.index(last).is_err()), (1, true));
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
            assert!(read(std::ptr::without_provenance_mut(value), |_| ()).is_err(), "{value:#x}");
        }
    }

    #[test]
    fn a_batch_is_destroyed_whole_or_not_at_all() {
        let (a, b) = (one(), one());
        assert!(destroy(&[a, b, a]).is_err());
        destroy(&[a, std::ptr::null_mut(), b]).unwrap();
        assert!(read(a, |_| ()).is_err() && read(b, |_| ()).is_err());
    }

    #[test]
    fn threads_do_not_meet() {
        std::thread::scope(|scope| {
            for thread in 0..4usize {
                scope.spawn(move || {
                    for round in 0..2000usize {
                        let tensor = one();
                        let data = thread * 10_000 + round;
                        change(tensor, |t| t.set_array(Param::RowwiseData, Array { data, ..Array::BLANK })).unwrap();
                        assert_eq!(read(tensor, |t| t.array(Param::RowwiseData).data).unwrap(), Some(data));
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
