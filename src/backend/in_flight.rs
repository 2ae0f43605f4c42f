//! The ring of calls in flight, shared without a lock by the thread that makes the calls and the watchdog. A word in each slot
//! says which call it holds. The caller, one thread at a time, takes free slots and fills them by plain stores. The watchdog
//! frees a slot only if the slot still holds the call that it looked at, and uses what it read only in that case.
#![forbid(unsafe_code)]

use crate::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use crate::progress::Step;

/// A slot for a call, with the events at the call's beginning and end on the device.
#[derive(Debug)]
pub(super) struct RingSlot<E> {
    pub(super) events: E,
    /// [`Call::word`]; 0 = the slot is free, or the caller is filling it.
    word: AtomicU64,
    /// The call's step, packed.
    step: AtomicU32,
}

/// The call that a slot held when the watchdog looked at it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Call {
    /// Twice its number, which is above 0; plus 1 if calls in front of it have no slot.
    word: u64,
    pub(super) step: Step,
}

impl Call {
    #[inline]
    const fn word(number: u64, behind_others: bool) -> u64 {
        number << 1 | behind_others as u64
    }

    pub(super) const fn number(self) -> u64 {
        self.word >> 1
    }

    /// Whether calls in front of it are not watched.
    pub(super) const fn is_behind_others(self) -> bool {
        self.word & 1 == 1
    }
}

impl<E> RingSlot<E> {
    pub(super) fn new(events: E) -> Self {
        Self { events, word: AtomicU64::new(0), step: AtomicU32::new(0) }
    }

    #[inline]
    fn is_free(&self) -> bool {
        self.word.load(Ordering::Acquire) == 0
    }

    /// Puts a call into a place that the caller took.
    #[inline]
    pub(super) fn fill(&self, number: u64, step: Step, behind_others: bool) {
        self.step.store(step.pack(), Ordering::Relaxed);
        self.word.store(Call::word(number, behind_others), Ordering::Release);
    }

    /// What the place holds. What is seen of its events from here on is true of this call if [`RingSlot::holds`] says so then.
    pub(super) fn look(&self) -> Option<Call> {
        let word = self.word.load(Ordering::Acquire);
        let step = Step::unpack(self.step.load(Ordering::Relaxed))?;
        (word != 0).then_some(Call { word, step })
    }

    /// Whether the place holds `call`, and has since [`RingSlot::look`] found it there.
    pub(super) fn holds(&self, call: Call) -> bool {
        fence(Ordering::Acquire);
        self.word.load(Ordering::Relaxed) == call.word
    }

    /// Frees the place if it holds `call`.
    pub(super) fn free(&self, call: Call) {
        // Else the caller took it for another, and it is not free.
        let _ = self.word.compare_exchange(call.word, 0, Ordering::Release, Ordering::Relaxed);
    }
}

/// Whose turn it is among the places of a group: they are taken one after the other, since calls end in their order.
#[derive(Debug, Default)]
pub(super) struct Cursor {
    next: usize,
    /// Whether calls since the last one that a place got are in none.
    skipped: bool,
}

impl Cursor {
    /// A place for the next call: a free one, or that of the newest call, which gives way. None where there are no places.
    #[inline]
    pub(super) fn take<'a, E>(&mut self, places: &'a [RingSlot<E>]) -> Option<&'a RingSlot<E>> {
        let oldest = places.get(self.next)?;
        let after = self.next + 1;
        if oldest.is_free() {
            self.next = if after == places.len() { 0 } else { after };
            return Some(oldest);
        }
        let newest = &places[self.next.checked_sub(1).unwrap_or(places.len() - 1)];
        self.skipped |= !newest.is_free();
        newest.word.store(0, Ordering::Relaxed);
        // Who sees what becomes of the events sees that the call is gone.
        fence(Ordering::Release);
        Some(newest)
    }

    /// Whether calls between the last that was put into a place and this one, which is, are in none.
    #[inline]
    pub(super) const fn take_skipped(&mut self) -> bool {
        std::mem::replace(&mut self.skipped, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress;
    use std::sync::atomic::AtomicBool;

    fn step(number: u64) -> Step {
        Step { size: number as usize & 0xFFFF, ..Step::of(progress::Call::Combine) }
    }

    fn places(count: usize) -> Vec<RingSlot<AtomicU64>> {
        (0..count).map(|_| RingSlot::new(AtomicU64::new(0))).collect()
    }

    /// Makes a call as far as places go; the "event" is the call's number.
    fn make(turn: &mut Cursor, places: &[RingSlot<AtomicU64>], number: u64) {
        let place = turn.take(places).unwrap();
        place.events.store(number, Ordering::Relaxed);
        place.fill(number, step(number), turn.take_skipped());
    }

    fn numbers(places: &[RingSlot<AtomicU64>]) -> Vec<u64> {
        let mut calls: Vec<_> = places.iter().filter_map(RingSlot::look).collect();
        calls.sort_by_key(|call| call.number());
        calls
            .into_iter()
            .map(|call| if call.is_behind_others() { 1000 + call.number() } else { call.number() })
            .collect()
    }

    #[test]
    fn the_oldest_stay_and_the_newest_gives_way() {
        let (places, mut turn) = (places(3), Cursor::default());
        (1..=3).for_each(|number| make(&mut turn, &places, number));
        assert_eq!(numbers(&places), [1, 2, 3]);
        (4..=6).for_each(|number| make(&mut turn, &places, number));
        assert_eq!(numbers(&places), [1, 2, 1006], "3, 4 and 5 are in no place");
        for place in &places[..2] {
            place.free(place.look().unwrap());
        }
        (7..=8).for_each(|number| make(&mut turn, &places, number));
        assert_eq!(numbers(&places), [1006, 7, 8]);
        make(&mut turn, &places, 9);
        assert_eq!(numbers(&places), [1006, 7, 1009]);
    }

    #[test]
    fn a_call_that_failed_leaves_its_place_to_the_next() {
        let (places, mut turn) = (places(2), Cursor::default());
        (1..=2).for_each(|number| make(&mut turn, &places, number));
        turn.take(&places).unwrap();
        assert_eq!(numbers(&places), [1]);
        make(&mut turn, &places, 3);
        assert_eq!(numbers(&places), [1, 1003], "2 was given up");
        assert!(Cursor::default().take::<()>(&[]).is_none());
    }

    #[test]
    fn a_place_that_was_taken_again_is_not_freed() {
        let (places, mut turn) = (places(1), Cursor::default());
        make(&mut turn, &places, 1);
        let first = places[0].look().unwrap();
        assert!(places[0].holds(first));
        turn.take(&places).unwrap();
        assert!(!places[0].holds(first));
        places[0].fill(2, step(2), turn.take_skipped());
        places[0].free(first);
        assert_eq!(numbers(&places), [1002]);
    }

    #[test]
    fn what_is_seen_of_a_call_is_its_own() {
        const CALLS: u64 = 20_000;
        let (places, done) = (places(4), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut turn = Cursor::default();
                (1..=CALLS).for_each(|number| make(&mut turn, &places, number));
                done.store(true, Ordering::Release);
            });
            loop {
                let last = done.load(Ordering::Acquire);
                for place in &places {
                    let Some(call) = place.look() else { continue };
                    let event = place.events.load(Ordering::Relaxed);
                    if place.holds(call) {
                        assert_eq!((event, call.step), (call.number(), step(call.number())));
                        place.free(call);
                    }
                }
                if last {
                    break;
                }
            }
        });
        assert!(places.iter().all(RingSlot::is_free));
    }
}
