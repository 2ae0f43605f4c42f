//! A library that is timed: of either ABI, ours or another's, with tensors of its own.

use crate::Outcome;
use crate::library::{self, Extensions, Tensors, table};
use libloading::os::unix::Library as UnixLibrary;
use nvte_ep_core::ffi::comm_window::{NVTECommWindow, ncclWindow_t};
use nvte_ep_core::ffi::register_layer::{self as plain, NVTEEpHandle};
use nvte_ep_core::ffi::te;
use nvte_ep_core::ffi::te_window::NVTECommWindow as TeWindow;
use nvte_ep_core::ffi::types::{NVTEDType, NVTETensor, cudaStream_t};
use nvte_ep_core::sys::{catch_foreign, file_of};
use std::ffi::{OsString, c_int, c_void};
use std::path::PathBuf;

table! {
    /// TransformerEngine's ABI since 2.19.
    TeFunctions:
    nvte_ep_initialize: fn(*mut c_void, *const te::NVTEEpGroupConfig);
    nvte_ep_shutdown: fn();
    nvte_ep_handle_mem_size: fn(*const te::NVTEEpLayerConfig) -> usize;
    nvte_ep_prepare: fn(NVTETensor, NVTETensor, NVTETensor, NVTETensor, *const te::NVTEEpLayerConfig, cudaStream_t);
    nvte_ep_dispatch: fn(NVTETensor, NVTETensor, NVTETensor, TeWindow, NVTETensor, TeWindow, NVTETensor, TeWindow, NVTETensor, TeWindow, cudaStream_t);
    nvte_ep_combine: fn(NVTETensor, NVTETensor, TeWindow, NVTETensor, cudaStream_t);
    nvte_ep_dispatch_bwd: fn(NVTETensor, NVTETensor, TeWindow, NVTETensor, TeWindow, NVTETensor, NVTETensor, cudaStream_t);
    nvte_ep_combine_bwd: fn(NVTETensor, NVTETensor, TeWindow, NVTETensor, TeWindow, cudaStream_t);
}

#[derive(Debug)]
enum Abi {
    RegisterLayer(library::Functions),
    Te(TeFunctions),
}

/// A loaded library; it stays loaded until the process ends.
#[derive(Debug)]
pub struct Contestant {
    /// The file it was loaded from.
    pub path: PathBuf,
    /// What it says it is; a library that is not ours says nothing.
    pub version: Option<String>,
    /// Its tensors.
    pub tensors: Tensors,
    /// Ours alone has them.
    pub extensions: Option<Extensions>,
    abi: Abi,
}

/// What a group is made from; all ranks pass the same.
#[derive(Debug, Clone, Copy)]
pub struct GroupShape {
    /// Number of ranks.
    pub ranks: c_int,
    /// Experts over all ranks.
    pub experts: c_int,
    /// Tokens of a rank.
    pub tokens: c_int,
    /// Rows of the receive buffers.
    pub capacity: c_int,
    /// Elements of a token.
    pub hidden: c_int,
    /// SM cap; 0 = the library's choice.
    pub max_sms: c_int,
    /// Widest type of a token.
    pub dtype: NVTEDType,
    /// Whether payloads lie in windows.
    pub zero_copy: bool,
    /// Experts of a token.
    pub top_k: c_int,
    /// Rows that a slab is padded to a multiple of.
    pub align: usize,
    /// Local experts.
    pub local_experts: c_int,
}

/// A layer of a group.
#[derive(Debug, Clone, Copy)]
pub struct Layer {
    id: u64,
    config: te::NVTEEpLayerConfig,
    /// Bytes of its handle memory.
    pub handle_bytes: usize,
}

/// Memory that peers may reach: windows of a payload and, for MXFP8, of its scales.
#[derive(Debug, Clone, Copy)]
pub struct Window {
    /// Of the payload.
    pub window: ncclWindow_t,
    /// Where it begins.
    pub offset: u64,
    /// Of the scales.
    pub scale_window: ncclWindow_t,
    /// Where they begin.
    pub scale_offset: u64,
}

impl Window {
    /// None: the tensor's own address is used.
    pub const NONE: Self =
        Self { window: std::ptr::null_mut(), offset: 0, scale_window: std::ptr::null_mut(), scale_offset: 0 };
}

/// Handle memory as a tensor, and the layer whose it is.
#[derive(Debug, Clone, Copy)]
pub struct Handle {
    /// The layer.
    pub layer: Layer,
    /// The memory.
    pub mem: NVTETensor,
}

/// An argument as each ABI has it.
trait Argument {
    type Plain;
    type Te;
    fn plain(self) -> Self::Plain;
    fn te(self) -> Self::Te;
}

/// Tensors and streams.
impl<T> Argument for *mut T {
    type Plain = Self;
    type Te = Self;
    fn plain(self) -> Self {
        self
    }
    fn te(self) -> Self {
        self
    }
}

impl Argument for Window {
    type Plain = NVTECommWindow;
    type Te = TeWindow;
    fn plain(self) -> NVTECommWindow {
        NVTECommWindow { window: self.window, offset: self.offset }
    }
    fn te(self) -> TeWindow {
        let Self { window, offset, scale_window, scale_offset } = self;
        TeWindow { window, offset, scale_window, scale_offset }
    }
}

impl Argument for &Handle {
    type Plain = NVTEEpHandle;
    type Te = NVTETensor;
    fn plain(self) -> NVTEEpHandle {
        NVTEEpHandle { id: self.layer.id, mem: self.mem }
    }
    fn te(self) -> NVTETensor {
        self.mem
    }
}

/// A call whose arguments are the same in both ABIs, each as that ABI has it.
macro_rules! call {
    ($abi:expr, $name:ident($($argument:expr),*)) => {{
        match $abi {
            Abi::RegisterLayer(f) => {
                let call = f.$name;
                // SAFETY: handle, tensors, windows and stream are live, as the methods of `Contestant` ask.
                catch_foreign(stringify!($name), || unsafe { call($(Argument::plain($argument)),*) })?;
            }
            Abi::Te(f) => {
                let call = f.$name;
                // SAFETY: as above.
                catch_foreign(stringify!($name), || unsafe { call($(Argument::te($argument)),*) })?;
            }
        }
        Ok(())
    }};
}

impl Contestant {
    /// Loads a library: the file `named`, else as [`library::Library::load`] finds it.
    pub fn load(named: Option<PathBuf>) -> Outcome<Self> {
        let (opened, path) = library::open(named)?;
        let abi = abi_of(&opened, &path)?;
        let tensors = Tensors::from_library(&opened).map_err(|error| {
            format!(
                "{} makes no tensors ({error}): name a library that does, libtransformer_engine.so for libnvte_ep_preload.so",
                path.display()
            )
        })?;
        let extensions = Extensions::from_library(&opened).ok();
        std::mem::forget(opened);
        let inside = match &abi {
            Abi::RegisterLayer(f) => f.nvte_ep_shutdown as *const c_void,
            Abi::Te(f) => f.nvte_ep_shutdown as *const c_void,
        };
        let version = extensions.as_ref().map(Extensions::version).transpose()?;
        Ok(Self { path: file_of(inside).unwrap_or(path), version, tensors, extensions, abi })
    }

    /// Initializes a group over `comm`; collective.
    pub fn initialize(&self, comm: *mut c_void, shape: &GroupShape) -> Outcome<()> {
        let GroupShape { ranks, experts, tokens, capacity, hidden, max_sms, dtype, zero_copy, top_k, .. } = *shape;
        match &self.abi {
            Abi::RegisterLayer(f) => {
                let config = plain::NVTEEpGroupConfig {
                    ep_size: ranks,
                    num_experts: experts,
                    max_tokens_per_rank: tokens,
                    max_recv_tokens_per_rank: capacity,
                    hidden_dim: hidden,
                    max_num_sms: max_sms,
                    allow_handle_mem_reloc: 0,
                    max_token_dtype: dtype,
                    zero_copy: c_int::from(zero_copy),
                };
                let initialize = f.nvte_ep_initialize;
                // SAFETY: the communicator is live and outlives the group; the configuration is passed by value.
                Ok(catch_foreign("nvte_ep_initialize", || unsafe { initialize(comm, config) })?)
            }
            Abi::Te(f) => {
                let config = te::NVTEEpGroupConfig {
                    struct_size: size_of::<te::NVTEEpGroupConfig>(),
                    ep_size: ranks,
                    num_experts: experts,
                    max_tokens_per_rank: tokens,
                    max_recv_tokens_per_rank: capacity,
                    hidden_dim: hidden,
                    num_comm_sms: max_sms,
                    max_token_dtype: dtype,
                    zero_copy: c_int::from(zero_copy),
                    num_topk: top_k,
                    drop_on_overflow: 0,
                };
                let (initialize, config) = (f.nvte_ep_initialize, &raw const config);
                // SAFETY: the communicator is live and outlives the group; the configuration is live and says its size.
                Ok(catch_foreign("nvte_ep_initialize", || unsafe { initialize(comm, config) })?)
            }
        }
    }

    /// Ends the group; collective, and no work is queued.
    pub fn shutdown(&self) -> Outcome<()> {
        let shutdown = match &self.abi {
            Abi::RegisterLayer(f) => f.nvte_ep_shutdown,
            Abi::Te(f) => f.nvte_ep_shutdown,
        };
        // SAFETY: takes nothing; no work is queued.
        Ok(catch_foreign("nvte_ep_shutdown", || unsafe { shutdown() })?)
    }

    /// The group's layer.
    pub fn layer(&self, shape: &GroupShape) -> Outcome<Layer> {
        let config = te::NVTEEpLayerConfig {
            struct_size: size_of::<te::NVTEEpLayerConfig>(),
            top_k: shape.top_k,
            dispatch_output_per_expert_alignment: shape.align,
        };
        match &self.abi {
            Abi::RegisterLayer(f) => {
                let registered = plain::NVTEEpLayerConfig {
                    num_local_experts: shape.local_experts,
                    top_k: shape.top_k,
                    dispatch_output_per_expert_alignment: shape.align,
                };
                let mut handle_bytes = 0;
                let (register, out) = (f.nvte_ep_register_layer, &raw mut handle_bytes);
                // SAFETY: `out` points to a live size_t.
                let id = catch_foreign("nvte_ep_register_layer", || unsafe { register(registered, out) })?;
                Ok(Layer { id, config, handle_bytes })
            }
            Abi::Te(f) => {
                let (size, pointer) = (f.nvte_ep_handle_mem_size, &raw const config);
                // SAFETY: the configuration is live and says its size.
                let handle_bytes = catch_foreign("nvte_ep_handle_mem_size", || unsafe { size(pointer) })?;
                Ok(Layer { id: 0, config, handle_bytes })
            }
        }
    }

    // Of the calls below: handle, tensors, windows and stream are live, their memory lives as long as the group, and every
    // rank makes the same calls in the same order.

    /// Queues a prepare.
    pub fn prepare(&self, handle: &Handle, idx: NVTETensor, counts: NVTETensor, stream: cudaStream_t) -> Outcome<()> {
        match &self.abi {
            Abi::RegisterLayer(f) => {
                let (prepare, plain) = (f.nvte_ep_prepare, handle.plain());
                let align = handle.layer.config.dispatch_output_per_expert_alignment;
                // SAFETY: as above.
                catch_foreign("nvte_ep_prepare", || unsafe { prepare(plain, idx, counts, align, stream) })?;
            }
            Abi::Te(f) => {
                let (prepare, none, mem) = (f.nvte_ep_prepare, std::ptr::null_mut(), handle.mem);
                let config = &raw const handle.layer.config;
                // SAFETY: as above.
                catch_foreign("nvte_ep_prepare", || unsafe { prepare(mem, idx, counts, none, config, stream) })?;
            }
        }
        Ok(())
    }

    /// Queues a dispatch: indices, tokens and their weights; received rows, which lie in `window`, and their weights.
    pub fn dispatch(
        &self,
        handle: &Handle,
        [idx, tokens, weights]: [NVTETensor; 3],
        [recv, recv_weights]: [NVTETensor; 2],
        window: Window,
        stream: cudaStream_t,
    ) -> Outcome<()> {
        let none = Window::NONE;
        call!(
            &self.abi,
            nvte_ep_dispatch(handle, idx, tokens, none, weights, none, recv, window, recv_weights, none, stream)
        )
    }

    /// Queues a combine of rows that lie in `window`.
    pub fn combine(
        &self,
        handle: &Handle,
        [rows, result]: [NVTETensor; 2],
        window: Window,
        stream: cudaStream_t,
    ) -> Outcome<()> {
        call!(&self.abi, nvte_ep_combine(handle, rows, window, result, stream))
    }

    /// Queues the gradient of combine, whose rows lie in `window`.
    pub fn combine_bwd(
        &self,
        handle: &Handle,
        [grad, rows]: [NVTETensor; 2],
        window: Window,
        stream: cudaStream_t,
    ) -> Outcome<()> {
        call!(&self.abi, nvte_ep_combine_bwd(handle, grad, Window::NONE, rows, window, stream))
    }

    /// Queues the gradient of dispatch: of received rows, which lie in `window`, and their weights; of tokens and weights.
    pub fn dispatch_bwd(
        &self,
        handle: &Handle,
        [grad, weights]: [NVTETensor; 2],
        [tokens, token_weights]: [NVTETensor; 2],
        window: Window,
        stream: cudaStream_t,
    ) -> Outcome<()> {
        let none = Window::NONE;
        call!(&self.abi, nvte_ep_dispatch_bwd(handle, grad, window, weights, none, tokens, token_weights, stream))
    }
}

fn abi_of(library: &UnixLibrary, path: &std::path::Path) -> Outcome<Abi> {
    let register_layer = library::Functions::from_library(library);
    let te = TeFunctions::from_library(library);
    match (register_layer, te) {
        (Ok(functions), _) => Ok(Abi::RegisterLayer(functions)),
        (Err(_), Ok(functions)) => Ok(Abi::Te(functions)),
        (Err(first), Err(second)) => Err(format!(
            "{} has neither ABI of nvte_ep_*: {first}; TransformerEngine's since 2.19: {second}",
            path.display()
        )
        .into()),
    }
}

/// The variables that NCCL EP reads, as they were when this was made: a library may set some for the process, and what one sets
/// is not to reach another.
#[derive(Debug)]
pub struct Variables(Vec<(OsString, OsString)>);

impl Variables {
    fn now() -> Vec<(OsString, OsString)> {
        std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"NCCL_EP_")).collect()
    }

    /// What is set now.
    pub fn of_the_process() -> Self {
        Self(Self::now())
    }

    /// Makes them what they were; those that had been changed.
    pub fn restore(&self) -> Vec<String> {
        let now = Self::now();
        let added = now.iter().filter(|(name, _)| !self.0.iter().any(|(known, _)| known == name));
        let mut changed: Vec<String> = added
            .map(|(name, _)| {
                // SAFETY: no group lives, and this program's other thread reads no variables.
                unsafe { std::env::remove_var(name) };
                name.to_string_lossy().into_owned()
            })
            .collect();
        for (name, value) in self.0.iter().filter(|pair| !now.contains(pair)) {
            // SAFETY: as above.
            unsafe { std::env::set_var(name, value) };
            changed.push(name.to_string_lossy().into_owned());
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_library_sets_does_not_stay() {
        let variables = Variables::of_the_process();
        // SAFETY: no other test of this program reads or writes this variable.
        unsafe { std::env::set_var("NCCL_EP_OF_A_TEST", "1") };
        assert_eq!(variables.restore(), ["NCCL_EP_OF_A_TEST"]);
        assert!(std::env::var_os("NCCL_EP_OF_A_TEST").is_none() && variables.restore().is_empty());
    }

    #[test]
    fn a_library_of_another_kind_is_refused() {
        let error = Contestant::load(Some("libc.so.6".into())).unwrap_err().to_string();
        assert!(error.starts_with("libc.so.6 has neither ABI of nvte_ep_*"), "{error}");
    }
}
