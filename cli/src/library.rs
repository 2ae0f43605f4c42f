//! libnvte_ep.so: where it is looked for, its functions, and tensors that release themselves.

use crate::Outcome;
use libloading::os::unix::{Library as UnixLibrary, RTLD_LOCAL, RTLD_NOW};
use nvte_ep_core::ffi::comm_window::{NVTECommWindow, ncclWindow_t};
use nvte_ep_core::ffi::ext::NVTEEpExtMemoryUsage;
use nvte_ep_core::ffi::register_layer::{NVTEEpGroupConfig, NVTEEpHandle, NVTEEpLayerConfig};
use nvte_ep_core::ffi::types::{
    NVTE_DELAYED_TENSOR_SCALING, NVTE_MXFP8_1D_SCALING, NVTEBasicTensor, NVTEDType, NVTEScalingMode, NVTEShape,
    NVTETensor, NVTETensorParam, cudaStream_t, kNVTEFloat8E8M0, kNVTERowwiseData, kNVTERowwiseScaleInv,
};
use nvte_ep_core::sys::{catch_foreign, file_of, own_directories};
use std::ffi::{CStr, c_char, c_void};
use std::path::PathBuf;
use std::time::SystemTime;

/// Declares a table of a library's functions and its constructor.
macro_rules! table {
    ($(#[$doc:meta])* $table:ident: $( $name:ident : fn($($argument:ty),*) $(-> $result:ty)?; )*) => {
        $(#[$doc])*
        #[allow(non_snake_case, missing_docs, reason = "fields carry the C functions' names")]
        #[derive(Debug)]
        pub struct $table {
            $( pub $name: unsafe extern "C-unwind" fn($($argument),*) $(-> $result)?, )*
        }

        impl $table {
            /// Of a library that has all of them.
            pub fn from_library(library: &UnixLibrary) -> Result<Self, libloading::Error> {
                Ok(Self {
                    // SAFETY: the symbol is the function of this name, whose prototype the ABI fixes.
                    $( $name: unsafe { *library.get(concat!(stringify!($name), "\0").as_bytes())? }, )*
                })
            }
        }
    };
}
pub(crate) use table;

table! {
    /// The functions of libnvte_ep.so. They report errors as C++ exceptions, so every call goes through
    /// [`catch_foreign`].
    Functions:
    nvte_ep_initialize: fn(*mut c_void, NVTEEpGroupConfig);
    nvte_ep_shutdown: fn();
    nvte_ep_register_layer: fn(NVTEEpLayerConfig, *mut usize) -> u64;
    nvte_ep_prepare: fn(NVTEEpHandle, NVTETensor, NVTETensor, usize, cudaStream_t);
    nvte_ep_dispatch: fn(NVTEEpHandle, NVTETensor, NVTETensor, NVTECommWindow, NVTETensor, NVTECommWindow, NVTETensor, NVTECommWindow, NVTETensor, NVTECommWindow, cudaStream_t);
    nvte_ep_combine: fn(NVTEEpHandle, NVTETensor, NVTECommWindow, NVTETensor, cudaStream_t);
    nvte_ep_dispatch_bwd: fn(NVTEEpHandle, NVTETensor, NVTECommWindow, NVTETensor, NVTECommWindow, NVTETensor, NVTETensor, cudaStream_t);
    nvte_ep_combine_bwd: fn(NVTEEpHandle, NVTETensor, NVTECommWindow, NVTETensor, NVTECommWindow, cudaStream_t);
}

table! {
    /// What is ours beyond the ABIs, in every library of ours.
    Extensions:
    nvte_ep_ext_version: fn() -> *const c_char;
    nvte_ep_ext_memory_usage: fn(*mut NVTEEpExtMemoryUsage);
    nvte_ep_ext_symm_alloc: fn(usize, *mut *mut c_void, *mut ncclWindow_t, *mut u64);
}

table! {
    /// Tensors as callers make them, of one library: others cannot read them.
    Tensors:
    nvte_create_tensor: fn(NVTEScalingMode) -> NVTETensor;
    nvte_set_tensor_param_v2: fn(NVTETensor, NVTETensorParam, *const c_void, usize);
    nvte_destroy_tensor: fn(NVTETensor);
}

/// No window: the tensor's own address is used.
pub const NO_WINDOW: NVTECommWindow = NVTECommWindow { window: std::ptr::null_mut(), offset: 0 };

/// The loaded library; it stays loaded until the process ends.
#[derive(Debug)]
pub struct Library {
    /// Its functions.
    pub functions: Functions,
    /// Its own ones.
    pub extensions: Extensions,
    /// Its tensors.
    pub tensors: Tensors,
    /// The file it was loaded from.
    pub path: PathBuf,
}

/// Names the library's file; set by the user.
pub const PATH_VARIABLE: &str = "NVTE_EP_LIB";

/// The library beside this program, in lib/ of an installed tree, or in deps/, where Cargo leaves it when it builds this
/// program alone. Newest first: after a build of this program alone the other one is of an earlier build.
fn built() -> Vec<PathBuf> {
    let mut found: Vec<(SystemTime, PathBuf)> = own_directories()
        .into_iter()
        .flat_map(|folder| {
            ["libnvte_ep.so", "../lib/libnvte_ep.so.1", "deps/libnvte_ep.so"].map(|name| folder.join(name))
        })
        .filter_map(|path| Some((path.metadata().ok()?.modified().ok()?, path)))
        .collect();
    found.sort_by_key(|(modified, _)| std::cmp::Reverse(*modified));
    found.into_iter().map(|(_, path)| path).collect()
}

impl Library {
    /// Loads the library: the file that `NVTE_EP_LIB` names, else the one beside this program, else the loader's.
    pub fn load(named: Option<PathBuf>) -> Outcome<Self> {
        let (library, path) = open(named)?;
        let foreign = |error| format!("{} is not a current libnvte_ep.so: {error}", path.display());
        let functions = Functions::from_library(&library).map_err(foreign)?;
        let extensions = Extensions::from_library(&library).map_err(foreign)?;
        let tensors = Tensors::from_library(&library).map_err(foreign)?;
        std::mem::forget(library);
        let path = file_of(functions.nvte_ep_initialize as *const c_void).unwrap_or(path);
        Ok(Self { functions, extensions, tensors, path })
    }
}

/// Opens the library that is named, or else is found as [`Library::load`] says.
pub fn open(named: Option<PathBuf>) -> Outcome<(UnixLibrary, PathBuf)> {
    let candidates = match named {
        Some(path) => vec![path],
        None => built().into_iter().chain([PathBuf::from("libnvte_ep.so.1")]).collect(),
    };
    let mut tried = Vec::new();
    for path in candidates {
        // SAFETY: the library's initialisers only set up its own statics.
        match unsafe { UnixLibrary::open(Some(&path), RTLD_NOW | RTLD_LOCAL) } {
            Ok(library) => return Ok((library, path)),
            Err(error) => {
                // The loader's own words are in the error's source.
                let cause = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
                tried.push(format!("\n  {cause}"));
            }
        }
    }
    let tried = tried.concat();
    Err(format!("libnvte_ep.so could not be loaded; build it (cargo build --release) or set {PATH_VARIABLE}:{tried}")
        .into())
}

impl Extensions {
    /// What the library says it is.
    pub fn version(&self) -> Outcome<String> {
        let function = self.nvte_ep_ext_version;
        // SAFETY: takes nothing.
        let text = catch_foreign("nvte_ep_ext_version", || unsafe { function() })?;
        if text.is_null() {
            return Err("nvte_ep_ext_version returned no text".into());
        }
        // SAFETY: the library returns a static NUL-terminated string.
        Ok(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    }
}

impl Tensors {
    /// A tensor over `shape` elements at the device address `address`.
    pub fn tensor(&self, address: u64, dtype: NVTEDType, shape: &[usize]) -> Outcome<Tensor<'_>> {
        let tensor = self.create(NVTE_DELAYED_TENSOR_SCALING)?;
        tensor.set(kNVTERowwiseData, address, dtype, shape)?;
        Ok(tensor)
    }

    /// An MXFP8 tensor: `shape` elements at `address`, and a scale for each 32 of a row at `scales`.
    pub fn scaled(&self, address: u64, dtype: NVTEDType, shape: [usize; 2], scales: u64) -> Outcome<Tensor<'_>> {
        let tensor = self.create(NVTE_MXFP8_1D_SCALING)?;
        tensor.set(kNVTERowwiseData, address, dtype, &shape)?;
        tensor.set(kNVTERowwiseScaleInv, scales, kNVTEFloat8E8M0, &[shape[0], shape[1] / 32])?;
        Ok(tensor)
    }

    fn create(&self, scaling: NVTEScalingMode) -> Outcome<Tensor<'_>> {
        let create = self.nvte_create_tensor;
        // SAFETY: takes a number.
        let raw = catch_foreign("nvte_create_tensor", || unsafe { create(scaling) })?;
        Ok(Tensor { raw, tensors: self })
    }
}

impl Tensor<'_> {
    fn set(&self, param: NVTETensorParam, address: u64, dtype: NVTEDType, shape: &[usize]) -> Outcome<()> {
        let mut data = [0; 15];
        data[..shape.len()].copy_from_slice(shape);
        let basic = NVTEBasicTensor {
            data_ptr: std::ptr::with_exposed_provenance_mut(address as usize),
            dtype,
            shape: NVTEShape { data, ndim: shape.len() },
        };
        let (set, raw) = (self.tensors.nvte_set_tensor_param_v2, self.raw);
        let basic = (&raw const basic).cast();
        catch_foreign("nvte_set_tensor_param_v2", || {
            // SAFETY: the tensor is live, and `basic` points to a live NVTEBasicTensor of the size given.
            unsafe { set(raw, param, basic, size_of::<NVTEBasicTensor>()) }
        })?;
        Ok(())
    }
}

/// A tensor of the library, destroyed when dropped. It does not own the memory it describes.
#[derive(Debug)]
pub struct Tensor<'a> {
    /// The C value.
    pub raw: NVTETensor,
    tensors: &'a Tensors,
}

impl Drop for Tensor<'_> {
    fn drop(&mut self) {
        let (destroy, raw) = (self.tensors.nvte_destroy_tensor, self.raw);
        // SAFETY: this value made the tensor and destroys it once. An exception leaves nothing to do: the tensor is gone.
        drop(catch_foreign("nvte_destroy_tensor", || unsafe { destroy(raw) }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_told_with_the_remedy() {
        let error = Library::load(Some("/nonexistent/libnvte_ep.so".into())).unwrap_err().to_string();
        assert!(error.contains("NVTE_EP_LIB") && error.contains("/nonexistent/libnvte_ep.so"), "{error}");
    }
}
