//! PTX of `kernels/*.cu`, by NVRTC.

use crate::Output;
use libloading::{Library, Symbol};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;

/// The oldest GPU that NCCL EP's high-throughput mode runs on; drivers translate this PTX for every later one.
const ARCHITECTURE: &CStr = c"--gpu-architecture=compute_90";

type Program = *mut c_void;

/// Generates the PTX of every kernel source with the NVRTC in the file `nvrtc`.
pub fn generate(root: &Path, nvrtc: &Path) -> Result<Vec<Output>, String> {
    // SAFETY: the caller names an NVRTC, whose initialisers run nothing of ours.
    let nvrtc = unsafe { Library::new(nvrtc) }.map_err(|e| e.to_string())?;
    let mut sources: Vec<_> = std::fs::read_dir(root.join("kernels"))
        .map_err(|e| format!("kernels: {e}"))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "cu"))
        .collect();
    sources.sort();
    let compile_one = |source: &std::path::PathBuf| {
        let text = std::fs::read_to_string(source).map_err(|e| format!("{}: {e}", source.display()))?;
        let ptx = compile(&nvrtc, &text).map_err(|e| format!("{}: {e}", source.display()))?;
        let name = source.file_stem().expect("it has an extension").to_string_lossy();
        Ok(Output { path: format!("kernels/{name}.ptx").into(), text: ptx })
    };
    sources.iter().map(compile_one).collect()
}

fn compile(nvrtc: &Library, source: &str) -> Result<String, String> {
    let source = CString::new(source).map_err(|e| e.to_string())?;
    // SAFETY: the signatures are those of nvrtc.h; every pointer lives across its call.
    unsafe {
        let create: Symbol<
            unsafe extern "C" fn(
                *mut Program,
                *const c_char,
                *const c_char,
                c_int,
                *const *const c_char,
                *const *const c_char,
            ) -> c_int,
        > = nvrtc.get(b"nvrtcCreateProgram").map_err(|e| e.to_string())?;
        let compile: Symbol<unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int> =
            nvrtc.get(b"nvrtcCompileProgram").map_err(|e| e.to_string())?;
        let mut program = std::ptr::null_mut();
        let (no_names, no_texts) = (std::ptr::null(), std::ptr::null());
        match create(&raw mut program, source.as_ptr(), std::ptr::null(), 0, no_texts, no_names) {
            0 => {}
            code => return Err(format!("nvrtcCreateProgram returned {code}")),
        }
        let options = [ARCHITECTURE.as_ptr()];
        match compile(program, options.len() as c_int, options.as_ptr()) {
            0 => {}
            code => {
                let log = text_of(nvrtc, program, b"nvrtcGetProgramLogSize", b"nvrtcGetProgramLog")?;
                return Err(format!("nvrtcCompileProgram returned {code}: {log}"));
            }
        }
        let ptx = text_of(nvrtc, program, b"nvrtcGetPTXSize", b"nvrtcGetPTX")?;
        // Without the compiler's own heading, which names builds, and the variables that it adds to every program.
        let own = |line: &&str| !line.starts_with("//") && !line.contains("2nv6target");
        let lines = ptx.lines().filter(own).skip_while(|line| line.is_empty());
        Ok(lines.flat_map(|line| [line.trim_end(), "\n"]).collect::<String>().trim_end().to_owned() + "\n")
    }
}

/// # Safety
/// `program` is live, and `size` and `get` are functions about its text.
unsafe fn text_of(nvrtc: &Library, program: Program, size: &[u8], get: &[u8]) -> Result<String, String> {
    // SAFETY: the signatures are those of nvrtc.h, and the buffer has the size that the first call tells.
    unsafe {
        let size: Symbol<unsafe extern "C" fn(Program, *mut usize) -> c_int> =
            nvrtc.get(size).map_err(|e| e.to_string())?;
        let get: Symbol<unsafe extern "C" fn(Program, *mut c_char) -> c_int> =
            nvrtc.get(get).map_err(|e| e.to_string())?;
        let mut bytes = 0;
        if size(program, &raw mut bytes) != 0 || bytes == 0 {
            return Err("NVRTC has no text".into());
        }
        let mut text = vec![0u8; bytes];
        if get(program, text.as_mut_ptr().cast()) != 0 {
            return Err("NVRTC gave no text".into());
        }
        let text = CStr::from_bytes_until_nul(&text).map_err(|e| e.to_string())?;
        text.to_str().map(str::to_owned).map_err(|e| e.to_string())
    }
}
