//! Programs that are compiled with the host runtime's headers and linked to it, with every symbol bound at the start.

use std::path::Path;
use std::process::Command;

use half::{bf16, f16};

/// Compiles a source of `tests/programs`.
fn compile(source: &str, program: &Path) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let library = std::env::current_exe().unwrap().with_file_name("libnvte_ep_host.so");
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let output = Command::new(compiler)
        .args(["-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-cast-function-type", "-Wl,-z,now"])
        .arg("-I")
        .arg(root.join("../include/nvte_ep_host"))
        .arg(root.join("tests/programs").join(source))
        .arg("-o")
        .arg(program)
        .arg(&library)
        .arg(format!("-Wl,-rpath,{}", library.parent().unwrap().display()))
        .output()
        .expect("a C++ compiler is installed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_program_that_nvcc_compiled_starts_and_is_told_of_its_kernels() {
    let folder = std::env::temp_dir().join(format!("nvte-ep-programs-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    let (program, given, result) = (folder.join("program"), folder.join("given"), folder.join("result"));
    compile("nvcc_built.cc", &program);
    // Every exponent, with digits around the middle between two narrow values.
    let digits = [0, 1, 0xfff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x7fff, 0x8000, 0x8001, 0x1_8000, 0x7f_f000, 0x7f_ffff];
    let floats: Vec<f32> =
        (0..512u32).flat_map(|head| digits.map(|digits| f32::from_bits(head << 23 | digits))).collect();
    std::fs::write(&given, floats.iter().flat_map(|value| value.to_ne_bytes()).collect::<Vec<u8>>()).unwrap();
    // The library would be found under its SONAME; the folder of the tests has it under its file name only.
    let links = folder.join("links");
    std::fs::create_dir(&links).unwrap();
    let library = std::env::current_exe().unwrap().with_file_name("libnvte_ep_host.so");
    std::os::unix::fs::symlink(library, links.join("libnvte_ep_host.so.1")).unwrap();
    let output = Command::new(&program).args([&given, &result]).env("LD_LIBRARY_PATH", &links).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}\n{err}");
    let lines: Vec<&str> = err.lines().collect();
    let launch = "nvte_ep_host: the kernel \"_Z5scalePf\" was launched, but the host runtime has no GPU to run it";
    assert_eq!(
        lines,
        [
            launch,
            launch,
            "nvte_ep_host: cudaFuncSetAttribute: not supported by the host runtime",
            "nvte_ep_host: ncclCommShrink: not supported by the host runtime"
        ]
    );

    let bytes = std::fs::read(&result).unwrap();
    let (wide, narrow) = bytes.split_at(65536 * 8);
    for (bits, value) in wide.as_chunks::<8>().0.iter().enumerate() {
        let [a, b, c, d, w, x, y, z] = *value;
        let (brain, half) = (f32::from_ne_bytes([a, b, c, d]), f32::from_ne_bytes([w, x, y, z]));
        let expected = (bf16::from_bits(bits as u16).to_f32(), f16::from_bits(bits as u16).to_f32());
        assert!(brain.to_bits() == expected.0.to_bits() || (brain.is_nan() && expected.0.is_nan()), "{bits:#x}");
        assert!(half.to_bits() == expected.1.to_bits() || (half.is_nan() && expected.1.is_nan()), "{bits:#x}");
    }
    let narrow = narrow.as_chunks::<4>().0;
    assert_eq!(narrow.len(), floats.len());
    for (value, [a, b, c, d]) in floats.iter().zip(narrow) {
        let (brain, half) =
            (bf16::from_bits(u16::from_ne_bytes([*a, *b])), f16::from_bits(u16::from_ne_bytes([*c, *d])));
        let expected = (bf16::from_f32(*value), f16::from_f32(*value));
        assert!(brain.to_bits() == expected.0.to_bits() || (brain.is_nan() && value.is_nan()), "{value:e}");
        assert!(half.to_bits() == expected.1.to_bits() || (half.is_nan() && value.is_nan()), "{value:e}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

/// The lists of what exists and what is refused.
#[test]
fn what_is_not_supported_is_exported_and_nothing_else_is_missing() {
    let exports: Vec<&str> = include_str!("../exports.txt").lines().collect();
    let refused: Vec<&str> = nvte_ep_host::surface::not_supported::NAMES.lines().collect();
    assert!(refused.iter().all(|name| exports.binary_search(name).is_ok()));
    for name in ["cudaFuncSetAttribute", "cudaGraphAddKernelNode", "ncclCommShrink", "pncclAllReduce", "ncclAlltoAll"] {
        assert!(refused.contains(&name), "{name}");
    }
}
