//! PTX of `kernels/*.cu`, by NVRTC.

use crate::Output;
use libloading::Library;
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
        let ptx = compile(&nvrtc, &text, root).map_err(|e| format!("{}: {e}", source.display()))?;
        let name = source.file_stem().expect("it has an extension").to_string_lossy();
        Ok(Output { path: format!("kernels/{name}.ptx").into(), text: ptx })
    };
    sources.iter().map(compile_one).collect()
}

type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Text = unsafe extern "C" fn(Program, *mut c_char) -> c_int;

/// A function of NVRTC, of the type that nvrtc.h gives it.
fn function<T: Copy>(nvrtc: &Library, name: &str) -> Result<T, String> {
    // SAFETY: the callers name the header's types.
    let function = unsafe { nvrtc.get::<T>(name.as_bytes()) };
    function.map(|function| *function).map_err(|e| e.to_string())
}

fn compile(nvrtc: &Library, source: &str, root: &Path) -> Result<String, String> {
    let source = CString::new(source).map_err(|e| e.to_string())?;
    let create: Create = function(nvrtc, "nvrtcCreateProgram")?;
    let compile: Compile = function(nvrtc, "nvrtcCompileProgram")?;
    let mut program = std::ptr::null_mut();
    let (out, text, none) = (&raw mut program, source.as_ptr(), std::ptr::null());
    // SAFETY: the source and the place for the program live across the call; there are no headers.
    match unsafe { create(out, text, std::ptr::null(), 0, none, none) } {
        0 => {}
        code => return Err(format!("nvrtcCreateProgram returned {code}")),
    }
    let include =
        CString::new(format!("--include-path={}", root.join("kernels").display())).map_err(|e| e.to_string())?;
    let options = [ARCHITECTURE.as_ptr(), c"--std=c++17".as_ptr(), include.as_ptr()];
    // SAFETY: the program is live, and the options live across the call.
    match unsafe { compile(program, options.len() as c_int, options.as_ptr()) } {
        0 => {}
        code => {
            let log = text_of(nvrtc, program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")?;
            return Err(format!("nvrtcCompileProgram returned {code}: {log}"));
        }
    }
    let ptx = text_of(nvrtc, program, "nvrtcGetPTXSize", "nvrtcGetPTX")?;
    // Without the compiler's own heading, which names builds, and the variables that it adds to every program.
    let own = |line: &&str| !line.starts_with("//") && !line.contains("2nv6target");
    let lines = ptx.lines().filter(own).skip_while(|line| line.is_empty());
    Ok(lines.flat_map(|line| [line.trim_end(), "\n"]).collect::<String>().trim_end().to_owned() + "\n")
}

/// A text of a live program, by the functions that tell its size and give it.
fn text_of(nvrtc: &Library, program: Program, size: &str, get: &str) -> Result<String, String> {
    let (size, get): (Size, Text) = (function(nvrtc, size)?, function(nvrtc, get)?);
    let mut bytes = 0;
    // SAFETY: the program is live.
    if unsafe { size(program, &raw mut bytes) } != 0 || bytes == 0 {
        return Err("NVRTC has no text".into());
    }
    let mut text = vec![0u8; bytes];
    // SAFETY: the program is live, and the buffer has the size that was told.
    if unsafe { get(program, text.as_mut_ptr().cast()) } != 0 {
        return Err("NVRTC gave no text".into());
    }
    let text = CStr::from_bytes_until_nul(&text).map_err(|e| e.to_string())?;
    text.to_str().map(str::to_owned).map_err(|e| e.to_string())
}
