//! Who acts: the exported function that the calling thread is in, its rank and its device.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::LazyLock;

use parking_lot::Mutex;

use crate::float::DefaultEnvironment;

thread_local! {
    static CALL: Cell<&'static str> = const { Cell::new("") };
    static RANK: Cell<Option<usize>> = const { Cell::new(None) };
    /// Device that the runtime interface uses on this thread.
    static SELECTED: Cell<i32> = const { Cell::new(0) };
    /// Device whose primary context is current on this thread.
    static CURRENT: Cell<Option<i32>> = const { Cell::new(None) };
}

/// The exported function that the calling thread is in.
#[derive(Debug)]
pub struct Call {
    outermost: Option<DefaultEnvironment>,
}

impl Call {
    /// Enters the function whose body `work` is; inside another one (a caller's allocator) nothing changes.
    pub fn enter<W>(work: &W) -> Self {
        let outermost = CALL.get().is_empty();
        if outermost {
            CALL.set(function_of(std::any::type_name_of_val(work)).unwrap_or_default());
            RANK.set(None);
        }
        Self { outermost: outermost.then(DefaultEnvironment::enter) }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if self.outermost.is_some() {
            CALL.set("");
        }
    }
}

/// The exported function in the name of its closure's type, which may be an argument of wrappers' types.
pub fn function_of(type_name: &str) -> Option<&str> {
    let (_, place) = type_name.rsplit_once("::surface::")?;
    place.split("::").nth(1)
}

/// The exported function that the calling thread is in; empty on a worker.
pub fn call() -> &'static str {
    CALL.get()
}

/// Ordinal of the device that the calling thread uses, whether or not its context is current.
pub fn device() -> i32 {
    CURRENT.get().unwrap_or_else(|| SELECTED.get())
}

/// Ordinal of the device whose context is current on the calling thread.
pub fn current_device() -> Option<i32> {
    CURRENT.get()
}

/// Makes a device's context current on the calling thread, or none.
pub fn set_current_device(ordinal: Option<i32>) {
    CURRENT.set(ordinal);
    if let Some(ordinal) = ordinal {
        SELECTED.set(ordinal);
    }
}

/// Notes as which rank the calling thread acts.
pub fn act_as(rank: usize) {
    RANK.set(Some(rank));
}

/// The ranks of the process's communicators.
#[derive(Default)]
struct Ranks {
    /// Device and rank of each.
    live: Vec<(i32, usize)>,
    /// The first of each device.
    first: HashMap<i32, usize>,
}

static RANKS: LazyLock<Mutex<Ranks>> = LazyLock::new(Mutex::default);

/// Notes that a communicator is going to be made.
pub fn will_be(device: i32, rank: usize) {
    RANKS.lock().first.entry(device).or_insert(rank);
}

/// Notes that a communicator is there.
pub fn joined(device: i32, rank: usize) {
    RANKS.lock().live.push((device, rank));
}

/// Notes that a communicator is gone.
pub fn left(device: i32, rank: usize) {
    let mut ranks = RANKS.lock();
    if let Some(place) = ranks.live.iter().position(|there| *there == (device, rank)) {
        ranks.live.swap_remove(place);
    }
}

/// The rank that the calling thread acts as: that of the call, or of the only communicator on the device that it uses.
pub fn rank() -> Option<usize> {
    RANK.get().or_else(|| {
        let (own, ranks) = (device(), RANKS.lock());
        let mut there = ranks.live.iter().filter(|(device, _)| *device == own);
        there.next().filter(|_| there.next().is_none()).map(|(_, rank)| *rank)
    })
}

/// The rank of the first communicator on the device that the calling thread uses.
pub fn first_rank() -> Option<usize> {
    RANKS.lock().first.get(&device()).copied()
}
