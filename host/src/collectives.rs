//! The collectives of a communicator, and transfers between two of its ranks.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

use nvte_ep_bindings::*;

use crate::channel::pairs::{Direction, Transfer};
use crate::channel::{Channel, PIECE_BYTES};
use crate::comm::{Comm, usage};
use crate::dtype::{self, Reduction};
use crate::fault::Outcome;
use crate::memory::Span;
use crate::queue::Stream;
use crate::{batch, check};

impl Comm {
    fn collective(
        &self,
        stream: &Arc<Stream>,
        spans: &[Span],
        run: impl Fn(&mut Channel) -> Outcome<()> + Send + Sync + 'static,
    ) -> Outcome<()> {
        check::stream_device(stream.device().ordinal, self.device.ordinal)?;
        batch::enqueue(&self.line, stream, spans, Arc::new(run))
    }

    fn checked_bytes(function: &str, count: usize, datatype: ncclDataType_t) -> Outcome<usize> {
        let size =
            dtype::size_of(datatype).ok_or_else(|| usage(format!("{function}: unknown data type {datatype}")))?;
        count.checked_mul(size).ok_or_else(|| usage(format!("{function}: count {count} is too large")))
    }

    /// `ncclAllGather`.
    ///
    /// # Safety
    ///
    /// `send` (`count` elements) and `receive` (`count` times the ranks) must stay valid until the stream has got there.
    pub unsafe fn all_gather(
        &self,
        send: *const c_void,
        receive: *mut c_void,
        count: usize,
        datatype: ncclDataType_t,
        stream: &Arc<Stream>,
    ) -> Outcome<()> {
        let bytes = Self::checked_bytes("ncclAllGather", count, datatype)?;
        let total =
            bytes.checked_mul(self.ranks).ok_or_else(|| usage(format!("ncclAllGather: count {count} is too large")))?;
        // SAFETY: the caller vouches for `send`.
        let send = unsafe { span("ncclAllGather", "sendbuff", send, bytes) }?;
        // SAFETY: the caller vouches for `receive`.
        let receive = unsafe { span("ncclAllGather", "recvbuff", receive, total) }?;
        let what = format!("ncclAllGather(sendcount={count}, datatype={})", dtype::name(datatype));
        self.collective(stream, &[send, receive], move |channel| {
            for piece in pieces(bytes, PIECE_BYTES) {
                send.read(piece.start, channel.stage(piece.len())?);
                channel.exchange(&what, [0; 4], piece.len())?;
                for rank in 0..channel.ranks() {
                    receive.write(rank * bytes + piece.start, channel.offer(rank)?.bytes);
                }
            }
            Ok(())
        })
    }

    /// `ncclAllReduce`.
    ///
    /// # Safety
    ///
    /// `send` and `receive` (`count` elements each) must stay valid until the stream has got there.
    pub unsafe fn all_reduce(
        &self,
        send: *const c_void,
        receive: *mut c_void,
        count: usize,
        datatype: ncclDataType_t,
        op: ncclRedOp_t,
        stream: &Arc<Stream>,
    ) -> Outcome<()> {
        let bytes = Self::checked_bytes("ncclAllReduce", count, datatype)?;
        let reduction = Self::checked_reduction("ncclAllReduce", datatype, op)?;
        // SAFETY: the caller vouches for `send`.
        let send = unsafe { span("ncclAllReduce", "sendbuff", send, bytes) }?;
        // SAFETY: the caller vouches for `receive`.
        let receive = unsafe { span("ncclAllReduce", "recvbuff", receive, bytes) }?;
        let what = format!("ncclAllReduce(count={count}, datatype={}, op={reduction:?})", dtype::name(datatype));
        self.collective(stream, &[send, receive], move |channel| {
            for piece in pieces(bytes, PIECE_BYTES) {
                send.read(piece.start, channel.stage(piece.len())?);
                channel.exchange(&what, [0; 4], piece.len())?;
                reduce_offers(channel, datatype, reduction, 0..piece.len(), &receive, piece.start)?;
            }
            Ok(())
        })
    }

    /// A reduction that this library does on this type.
    fn checked_reduction(function: &str, datatype: ncclDataType_t, op: ncclRedOp_t) -> Outcome<Reduction> {
        let reduction = Reduction::from_nccl(op)
            .ok_or_else(|| usage(format!("{function}: reduction {op} is not supported by the host runtime")))?;
        if !dtype::reducible(datatype) {
            let text = format!("{function}: {} is not supported by the host runtime", dtype::name(datatype));
            return Err(usage(text));
        }
        Ok(reduction)
    }

    fn checked_rank(&self, function: &str, argument: &str, rank: i32) -> Outcome<usize> {
        let known = usize::try_from(rank).ok().filter(|rank| *rank < self.ranks);
        known.ok_or_else(|| usage(format!("{function}: {argument} {rank} of {} ranks", self.ranks)))
    }

    /// `ncclReduce`.
    ///
    /// # Safety
    ///
    /// `send`, and on the root `receive` (`count` elements each), must stay valid until the stream has got there.
    #[expect(clippy::too_many_arguments, reason = "those of the C function")]
    pub unsafe fn reduce(
        &self,
        send: *const c_void,
        receive: *mut c_void,
        count: usize,
        datatype: ncclDataType_t,
        op: ncclRedOp_t,
        root: i32,
        stream: &Arc<Stream>,
    ) -> Outcome<()> {
        let bytes = Self::checked_bytes("ncclReduce", count, datatype)?;
        let reduction = Self::checked_reduction("ncclReduce", datatype, op)?;
        let root = self.checked_rank("ncclReduce", "root", root)?;
        let is_root = root == self.rank;
        // SAFETY: the caller vouches for `send`.
        let send = unsafe { span("ncclReduce", "sendbuff", send, bytes) }?;
        // SAFETY: the caller vouches for `receive` on the root; elsewhere it is not looked at.
        let receive = unsafe { span("ncclReduce", "recvbuff", receive, if is_root { bytes } else { 0 }) }?;
        let name = dtype::name(datatype);
        let what = format!("ncclReduce(count={count}, datatype={name}, op={reduction:?}, root={root})");
        self.collective(stream, &[send, receive], move |channel| {
            for piece in pieces(bytes, PIECE_BYTES) {
                send.read(piece.start, channel.stage(piece.len())?);
                channel.exchange(&what, [0; 4], piece.len())?;
                if is_root {
                    reduce_offers(channel, datatype, reduction, 0..piece.len(), &receive, piece.start)?;
                }
            }
            Ok(())
        })
    }

    /// `ncclReduceScatter`.
    ///
    /// # Safety
    ///
    /// `send` (`count` elements for each rank) and `receive` (`count`) must stay valid until the stream has got there.
    pub unsafe fn reduce_scatter(
        &self,
        send: *const c_void,
        receive: *mut c_void,
        count: usize,
        datatype: ncclDataType_t,
        op: ncclRedOp_t,
        stream: &Arc<Stream>,
    ) -> Outcome<()> {
        let bytes = Self::checked_bytes("ncclReduceScatter", count, datatype)?;
        let reduction = Self::checked_reduction("ncclReduceScatter", datatype, op)?;
        let (rank, ranks) = (self.rank, self.ranks);
        let total = bytes
            .checked_mul(ranks)
            .ok_or_else(|| usage(format!("ncclReduceScatter: recvcount {count} is too large")))?;
        // SAFETY: the caller vouches for `send`.
        let send = unsafe { span("ncclReduceScatter", "sendbuff", send, total) }?;
        // SAFETY: the caller vouches for `receive`.
        let receive = unsafe { span("ncclReduceScatter", "recvbuff", receive, bytes) }?;
        let what =
            format!("ncclReduceScatter(recvcount={count}, datatype={}, op={reduction:?})", dtype::name(datatype));
        // Whole elements of any type.
        let most = (PIECE_BYTES / ranks).next_multiple_of(8);
        self.collective(stream, &[send, receive], move |channel| {
            for piece in pieces(bytes, most) {
                let length = piece.len();
                let staged = channel.stage(length * ranks)?;
                for (to, part) in staged.chunks_exact_mut(length.max(1)).enumerate() {
                    send.read(to * bytes + piece.start, part);
                }
                channel.exchange(&what, [0; 4], length * ranks)?;
                reduce_offers(channel, datatype, reduction, rank * length..(rank + 1) * length, &receive, piece.start)?;
            }
            Ok(())
        })
    }

    /// `ncclSend` and `ncclRecv`: inside a group the transfers go on side by side when it ends.
    ///
    /// # Safety
    ///
    /// `buffer` (`count` elements) must stay valid until the stream has got there.
    pub unsafe fn transfer(
        &self,
        direction: Direction,
        buffer: *const c_void,
        count: usize,
        datatype: ncclDataType_t,
        peer: i32,
        stream: &Arc<Stream>,
    ) -> Outcome<()> {
        let (function, argument) = match direction {
            Direction::Send => ("ncclSend", "sendbuff"),
            Direction::Receive => ("ncclRecv", "recvbuff"),
        };
        let bytes = Self::checked_bytes(function, count, datatype)?;
        let peer = self.checked_rank(function, "peer", peer)?;
        // SAFETY: the caller vouches for the buffer.
        let span = unsafe { span(function, argument, buffer, bytes) }?;
        let transfer = Transfer { direction, peer, span, count, datatype };
        check::stream_device(stream.device().ordinal, self.device.ordinal)?;
        batch::transfer(&self.line, stream, transfer)
    }

    /// `ncclBroadcast`.
    ///
    /// # Safety
    ///
    /// `send` (on the root) and `receive` (`count` elements) must stay valid until the stream has got there.
    pub unsafe fn broadcast(
        &self,
        send: *const c_void,
        receive: *mut c_void,
        count: usize,
        datatype: ncclDataType_t,
        root: i32,
        stream: &Arc<Stream>,
    ) -> Outcome<()> {
        let bytes = Self::checked_bytes("ncclBroadcast", count, datatype)?;
        let root = self.checked_rank("ncclBroadcast", "root", root)?;
        let is_root = root == self.rank;
        // SAFETY: the caller vouches for `send` on the root; elsewhere it is not looked at.
        let send = unsafe { span("ncclBroadcast", "sendbuff", send, if is_root { bytes } else { 0 }) }?;
        // SAFETY: the caller vouches for `receive`.
        let receive = unsafe { span("ncclBroadcast", "recvbuff", receive, bytes) }?;
        let what = format!("ncclBroadcast(count={count}, datatype={}, root={root})", dtype::name(datatype));
        self.collective(stream, &[send, receive], move |channel| {
            for piece in pieces(bytes, PIECE_BYTES) {
                let own = if is_root { piece.len() } else { 0 };
                send.read(if is_root { piece.start } else { 0 }, channel.stage(own)?);
                channel.exchange(&what, [0; 4], own)?;
                receive.write(piece.start, channel.offer(root)?.bytes);
            }
            Ok(())
        })
    }
}

/// The parts in which `bytes` bytes travel: at least one, so that ranks meet even for nothing.
fn pieces(bytes: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    (0..bytes.max(1)).step_by(most).map(move |start| start..(start + most).min(bytes))
}

/// Reduces `part` of what each rank offers into `receive`, at `offset`.
fn reduce_offers(
    channel: &Channel,
    datatype: ncclDataType_t,
    reduction: Reduction,
    part: Range<usize>,
    receive: &Span,
    offset: usize,
) -> Outcome<()> {
    let offer = |rank| channel.offer(rank).map(|offer| &offer.bytes[part.clone()]);
    let inputs = (0..channel.ranks()).map(offer).collect::<Outcome<Vec<&[u8]>>>()?;
    let mut output = vec![0u8; part.len()];
    dtype::reduce(datatype, reduction, &inputs, &mut output);
    receive.write(offset, &output);
    Ok(())
}

/// # Safety
///
/// As [`Span::new`].
unsafe fn span(function: &str, argument: &str, pointer: *const c_void, bytes: usize) -> Outcome<Span> {
    // SAFETY: passed on to the caller.
    unsafe { Span::new(pointer, bytes) }.map_err(|fault| usage(format!("{function}: {argument}: {}", fault.text)))
}
