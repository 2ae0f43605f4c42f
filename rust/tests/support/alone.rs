// Device memory over the host runtime, for documentation tests and the crate's own. Programs have cudarc or their own.

#[allow(dead_code, reason = "not every test needs all of it")]
mod alone {
    use nvte_ep::{Element, RawSlice};
    use nvte_ep_core::env::Env;
    use nvte_ep_core::sys::{self, Base};
    use std::ops::{Deref, DerefMut};
    use std::path::PathBuf;

    /// The host runtime that was built with the tests: beside the test program, or where Cargo has the loader look.
    fn host_library() -> PathBuf {
        let program = std::env::current_exe().unwrap();
        let paths = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let folders = std::env::split_paths(&paths).chain([program.parent().unwrap().to_owned()]);
        let mut files = folders.map(|folder| folder.join("libnvte_ep_host.so"));
        files.find(|file| file.is_file()).expect("the host runtime was not built with the tests")
    }

    /// A device of the host runtime.
    pub struct Alone {
        base: &'static Base,
    }

    impl Alone {
        pub fn new() -> Self {
            Self::on(0)
        }

        pub fn on(device: i32) -> Self {
            // SAFETY: no other thread runs yet that reads variables.
            unsafe { std::env::set_var("NVTE_EP_RUNTIME", "host") };
            // SAFETY: as above.
            unsafe { std::env::set_var("NVTE_EP_HOST_LIB", host_library()) };
            let base = sys::base(&Env::from_process().unwrap()).unwrap();
            base.cuda.set_current_device(device).unwrap();
            Self { base }
        }

        pub fn zeros<T: Element + Default>(&self, len: usize) -> Memory<T> {
            self.filled(&vec![T::default(); len])
        }

        pub fn filled<T: Element>(&self, values: &[T]) -> Memory<T> {
            let (cuda, bytes) = (&self.base.cuda, size_of_val(values));
            let mut address = 0;
            // SAFETY: `address` is live.
            assert_eq!(unsafe { (cuda.cuMemAlloc_v2)(&raw mut address, bytes.max(1)) }, 0);
            // SAFETY: the memory is as large.
            let slice = unsafe { RawSlice::new(address, values.len()) };
            let memory = Memory { slice, base: self.base };
            memory.put(values);
            memory
        }

        pub fn wait(&self) {
            // SAFETY: takes nothing.
            assert_eq!(unsafe { (self.base.cuda.cuCtxSynchronize)() }, 0);
        }
    }

    pub struct Memory<T> {
        slice: RawSlice<T>,
        base: &'static Base,
    }

    impl<T: Element> Memory<T> {
        pub fn put(&self, values: &[T]) {
            put(self.base, self.address(), values);
        }

        pub fn get(&self, len: usize) -> Vec<T>
        where
            T: Default,
        {
            get(self.base, self.address(), len)
        }
    }

    pub fn put<T: Element>(base: &Base, address: u64, values: &[T]) {
        let copy = base.cuda.cuMemcpyHtoDAsync_v2;
        // SAFETY: the memory is as large, and the copy is waited for.
        let code = unsafe { copy(address, values.as_ptr().cast(), size_of_val(values), std::ptr::null_mut()) };
        // SAFETY: takes nothing.
        assert_eq!((code, unsafe { (base.cuda.cuCtxSynchronize)() }), (0, 0));
    }

    pub fn get<T: Element + Default>(base: &Base, address: u64, len: usize) -> Vec<T> {
        let mut values = vec![T::default(); len];
        let copy = base.cuda.cuMemcpyDtoHAsync_v2;
        // SAFETY: the memory is as large, and the copy is waited for.
        let code =
            unsafe { copy(values.as_mut_ptr().cast(), address, size_of_val(values.as_slice()), std::ptr::null_mut()) };
        // SAFETY: takes nothing.
        assert_eq!((code, unsafe { (base.cuda.cuCtxSynchronize)() }), (0, 0));
        values
    }

    impl<T> Deref for Memory<T> {
        type Target = RawSlice<T>;

        fn deref(&self) -> &RawSlice<T> {
            &self.slice
        }
    }

    impl<T> DerefMut for Memory<T> {
        fn deref_mut(&mut self) -> &mut RawSlice<T> {
            &mut self.slice
        }
    }
}
#[allow(unused_imports, reason = "not every test needs all of it")]
use alone::{Alone, Memory, get, put};
