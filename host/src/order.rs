//! Which operations of EP groups a stream, an event or the host has behind it.
//!
//! On a GPU two operations of a group are ordered only if they are on one stream, or if events or waits of the host order
//! their streams. Here a group's operations run in order anyway, so what the caller ordered is kept beside it: for each
//! group the number of the last operation that a stream's next work, or the host, comes behind.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;

/// Closed groups are dropped from a record once it is longer than this.
const LONG: usize = 16;

/// The last operation of each group that is known to come before.
#[derive(Clone, Debug, Default)]
pub struct Behind(Option<Arc<HashMap<u64, u64>>>);

static HOST: Mutex<Behind> = Mutex::new(Behind(None));
static OPEN: LazyLock<Mutex<(u64, HashSet<u64>)>> = LazyLock::new(Mutex::default);

thread_local! {
    /// What the work that this worker runs comes behind.
    static RUNNING: RefCell<Behind> = const { RefCell::new(Behind(None)) };
}

impl Behind {
    /// Adds what `other` comes behind.
    pub fn merge(&mut self, other: &Self) {
        let Some(theirs) = &other.0 else { return };
        match &mut self.0 {
            None => self.0 = Some(Arc::clone(theirs)),
            Some(own) if Arc::ptr_eq(own, theirs) => {}
            Some(own) => {
                if theirs.iter().any(|(group, last)| own.get(group).is_none_or(|there| there < last)) {
                    let own = Arc::make_mut(own);
                    for (group, last) in &**theirs {
                        let there = own.entry(*group).or_default();
                        *there = (*there).max(*last);
                    }
                    shorten(own);
                }
            }
        }
    }

    /// The last operation of a group that comes before; 0 for none.
    pub fn last(&self, group: u64) -> u64 {
        self.0.as_ref().and_then(|own| own.get(&group)).copied().unwrap_or(0)
    }

    /// Puts an operation of a group before.
    pub fn put(&mut self, group: u64, operation: u64) {
        let own = Arc::make_mut(self.0.get_or_insert_default());
        shorten(own);
        own.insert(group, operation);
    }
}

/// Drops closed groups from a record that is long. Without that the host's record, into which every wait merges a stream's,
/// would hold every group that ever was, and each wait would copy it.
fn shorten(record: &mut HashMap<u64, u64>) {
    if record.len() > LONG {
        let open = OPEN.lock();
        record.retain(|group, _| open.1.contains(group));
    }
}

/// A number for a new group.
pub fn open() -> u64 {
    let mut open = OPEN.lock();
    open.0 += 1;
    let number = open.0;
    open.1.insert(number);
    number
}

/// Forgets a group.
pub fn close(group: u64) {
    OPEN.lock().1.remove(&group);
}

/// The host has waited for work that comes behind `behind`, or has seen that it is done.
pub fn host_learns(behind: &Behind) {
    HOST.lock().merge(behind);
}

/// What everything that the host enqueues from now on comes behind.
pub fn of_host() -> Behind {
    HOST.lock().clone()
}

/// Notes what the work comes behind that the calling worker is about to run.
pub fn runs(behind: &Behind) {
    RUNNING.set(behind.clone());
}

/// A host function runs: it may tell the program that everything before it is done.
pub fn host_learns_from_running() {
    RUNNING.with_borrow(host_learns);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_later_operation_of_each_group_counts() {
        let (first, second) = (open(), open());
        let (mut a, mut b) = (Behind::default(), Behind::default());
        a.put(first, 3);
        a.put(second, 1);
        b.put(first, 2);
        b.put(second, 5);
        let before = a.clone();
        a.merge(&b);
        assert_eq!((a.last(first), a.last(second)), (3, 5));
        assert_eq!((before.last(first), before.last(second)), (3, 1));
        for group in [first, second] {
            close(group);
        }
        let mut long = a;
        for _ in 0..=LONG {
            let group = open();
            long.put(group, 1);
            close(group);
        }
        assert_eq!(long.last(first), 0, "closed groups are forgotten");
    }

    #[test]
    fn a_record_that_merges_for_ever_stays_short() {
        let kept = open();
        let mut host = Behind::default();
        host.put(kept, 7);
        for _ in 0..50 * LONG {
            let group = open();
            let mut stream = Behind::default();
            stream.put(group, 1);
            host.merge(&stream);
            close(group);
        }
        assert!(host.0.as_ref().unwrap().len() <= LONG + 1, "closed groups are dropped");
        assert_eq!(host.last(kept), 7, "an open one is not");
        close(kept);
    }
}
