//! Work over a few threads: contiguous shares for slices, a shared counter for uneven pieces.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Runs `work(i)` for every `i` below `count` on up to `threads` threads; results in order of `i`.
pub fn map<T: Send>(threads: usize, count: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    if threads <= 1 || count <= 1 {
        return (0..count).map(work).collect();
    }
    let next = AtomicUsize::new(0);
    let take = || {
        let mut done = Vec::new();
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= count {
                return done;
            }
            done.push((i, work(i)));
        }
    };
    let mut all: Vec<(usize, T)> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads.min(count)).map(|_| scope.spawn(take)).collect();
        workers
            .into_iter()
            .flat_map(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    all.sort_by_key(|(i, _)| *i);
    all.into_iter().map(|(_, result)| result).collect()
}

/// Cuts `data` into pieces of `piece` elements and runs `work(index of the piece, piece)` on up to `threads` threads.
pub fn each<T: Send>(threads: usize, data: &mut [T], piece: usize, work: impl Fn(usize, &mut [T]) + Sync) {
    let pieces = data.len().div_ceil(piece.max(1));
    let share = pieces.div_ceil(threads.max(1)).max(1);
    if threads <= 1 || pieces <= 1 {
        data.chunks_mut(piece.max(1)).enumerate().for_each(|(i, piece)| work(i, piece));
        return;
    }
    let work = &work;
    std::thread::scope(|scope| {
        for (part, data) in data.chunks_mut(share * piece).enumerate() {
            scope.spawn(move || {
                data.chunks_mut(piece).enumerate().for_each(|(i, piece)| work(part * share + i, piece));
            });
        }
    });
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_piece_once_and_in_order() {
        for threads in [1, 2, 5] {
            assert_eq!(super::map(threads, 7, |i| i * i), [0, 1, 4, 9, 16, 25, 36]);
            let mut data = vec![0usize; 23];
            super::each(threads, &mut data, 4, |i, piece| piece.iter_mut().for_each(|x| *x += i + 1));
            let expected: Vec<usize> = (0..23).map(|i| i / 4 + 1).collect();
            assert_eq!(data, expected);
            super::each(threads, &mut [0u8; 0], 4, |_, _| panic!("no piece"));
        }
    }
}
