//! The core's lock-free modules over loom's atomics, which try every order of loads and stores that the language allows.
//! The files are the core's own; the modules that they name, `crate::atomic` and `crate::progress`, stand in for those of
//! the core.

mod atomic {
    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
    pub(crate) use loom::thread::yield_now as pause;
    /// A reader that comes between two writes finds rest at the third try.
    pub(crate) const TRIES: u32 = 3;
}

#[allow(dead_code, reason = "the modules' own tests, which are compiled here too, use all of it")]
mod progress {
    pub(crate) enum Call {
        Combine,
    }

    /// A step of a call: a number, as far as the modules here go.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) struct Step {
        pub(crate) size: usize,
        pub(crate) top_k: u32,
    }

    impl Step {
        pub(crate) const fn of(_: Call) -> Self {
            Self { size: 0, top_k: 0 }
        }

        pub(crate) const fn pack(self) -> u32 {
            self.size as u32
        }

        #[allow(clippy::unnecessary_wraps, reason = "the core's may fail")]
        pub(crate) const fn unpack(word: u32) -> Option<Self> {
            Some(Self { size: word as usize, top_k: 0 })
        }
    }
}

#[allow(dead_code, reason = "the core uses all of it")]
#[path = "../../../src/backend/in_flight.rs"]
mod in_flight;

#[allow(dead_code, reason = "the core uses all of it")]
#[path = "../../../src/progress/note.rs"]
mod note;

use atomic::{AtomicU64, Ordering};
use in_flight::{Cursor, RingSlot};
use loom::sync::{Arc, Mutex};
use loom::thread;
use progress::Step;

fn words(count: usize) -> Arc<Vec<AtomicU64>> {
    Arc::new((0..count).map(|_| AtomicU64::new(0)).collect())
}

const fn step(number: u64) -> Step {
    Step { size: number as usize, ..Step::of(progress::Call::Combine) }
}

/// A reader sees one of the notes whole, or no text.
pub fn notes_are_never_mixed() {
    loom::model(|| {
        let words = words(note::TEXT + 2);
        note::write(&words, 1, 0, "");
        let writer = Arc::clone(&words);
        let writer = thread::spawn(move || note::write(&writer, 1, 7, "aaaaaaaaaaaaaaaa"));
        let read = note::read(&words);
        let seen = (read.state, read.refused, read.text.as_str());
        assert!([(1, 0, ""), (1, 7, "aaaaaaaaaaaaaaaa")].contains(&seen), "{seen:?}");
        writer.join().unwrap();
        assert_eq!(note::read(&words).refused, 7);
    });
}

/// The thread that gives up and a caller whose call is refused: the end is the last word, whoever is first.
pub fn giving_up_is_the_last_word() {
    loom::model(|| {
        let (words, writing) = (words(note::TEXT + 1), Arc::new(Mutex::new(())));
        let (other, lock) = (Arc::clone(&words), Arc::clone(&writing));
        let watch = thread::spawn(move || {
            let _only_writer = lock.lock().unwrap();
            note::write(&other, note::GAVE_UP, 0, "gone");
        });
        {
            let _only_writer = writing.lock().unwrap();
            note::write(&words, 1, 3, "refused");
        }
        watch.join().unwrap();
        let read = note::read(&words);
        assert_eq!((read.state, read.text.as_str()), (note::GAVE_UP, "gone"));
    });
}

/// What the watching thread believes of a call is true of that call, though the caller takes its place for the next; and a
/// place that the caller took again is not freed.
pub fn what_is_seen_of_a_call_is_its_own() {
    loom::model(|| {
        let places: Arc<Vec<RingSlot<AtomicU64>>> = Arc::new(vec![RingSlot::new(AtomicU64::new(0))]);
        let shared = Arc::clone(&places);
        // The reader is the spawned thread: with the parts exchanged, loom tries no order in which it sees a call.
        let watch = thread::spawn(move || {
            let place = &shared[0];
            let Some(call) = place.look() else { return };
            let event = place.events.load(Ordering::Relaxed);
            if place.holds(call) {
                assert_eq!((event, call.step), (call.number(), step(call.number())));
                place.free(call);
            }
        });
        let mut turn = Cursor::default();
        for number in 1..=2u64 {
            let place = turn.take(&places).unwrap();
            place.events.store(number, Ordering::Relaxed);
            place.fill(number, step(number), turn.take_skipped());
        }
        watch.join().unwrap();
        let left = places[0].look().map(|call| (call.number(), call.step));
        assert!([None, Some((2, step(2)))].contains(&left), "{left:?}");
    });
}
