//! Events.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};
use std::time::Instant;

use nvte_ep_bindings::{
    CUevent, cudaErrorInvalidResourceHandle, cudaErrorInvalidValue, cudaErrorNotReady, cudaErrorNotSupported,
    cudaEventBlockingSync, cudaEventDisableTiming, cudaEventInterprocess,
};
use parking_lot::Mutex;

use crate::device;
use crate::fault::{Fault, Outcome};
use crate::graph::{self, Mark};
use crate::queue::{Point, Run, Stream};

static EVENTS: LazyLock<Mutex<HashMap<usize, Arc<Event>>>> = LazyLock::new(Mutex::default);

/// A marker in a stream.
#[derive(Debug)]
pub struct Event {
    timing: bool,
    record: Mutex<Record>,
}

/// Where an event was last recorded.
#[derive(Clone, Debug)]
enum Record {
    Never,
    /// In a stream.
    At {
        point: Point,
        time: Arc<Mutex<Option<Instant>>>,
    },
    /// In a capture.
    Captured(Mark),
}

impl Event {
    /// Creates an event for a caller.
    pub fn open(flags: u32) -> Outcome<CUevent> {
        let known = cudaEventBlockingSync | cudaEventDisableTiming | cudaEventInterprocess;
        if flags & !known != 0 {
            return Err(Fault::cuda(cudaErrorInvalidValue, format!("unknown event flags {flags:#x}")));
        }
        if flags & cudaEventInterprocess != 0 {
            return Err(Fault::cuda(
                cudaErrorNotSupported,
                "interprocess events are not supported by the host runtime",
            ));
        }
        let event = Arc::new(Event { timing: flags & cudaEventDisableTiming == 0, record: Mutex::new(Record::Never) });
        let handle = Arc::as_ptr(&event) as usize;
        EVENTS.lock().insert(handle, event);
        Ok(handle as CUevent)
    }

    /// The event that a handle names.
    pub fn resolve(handle: CUevent) -> Outcome<Arc<Event>> {
        EVENTS.lock().get(&(handle as usize)).cloned().ok_or_else(|| Self::unknown(handle))
    }

    /// Destroys a caller's event.
    pub fn destroy(handle: CUevent) -> Outcome<()> {
        EVENTS.lock().remove(&(handle as usize)).map(drop).ok_or_else(|| Self::unknown(handle))
    }

    fn unknown(handle: CUevent) -> Fault {
        Fault::cuda(cudaErrorInvalidResourceHandle, format!("{handle:p} is not a live event"))
    }

    /// Puts the event at the end of a stream.
    pub fn record(&self, stream: &Arc<Stream>) -> Outcome<()> {
        if let Some(mark) = graph::mark(stream)? {
            *self.record.lock() = Record::Captured(mark);
            return Ok(());
        }
        let time = Arc::new(Mutex::new(None));
        let stamp = Arc::clone(&time);
        let run: Run = Arc::new(move |sticky| {
            if sticky.is_none() {
                *stamp.lock() = Some(Instant::now());
            }
            Ok(())
        });
        let point = stream.push(Vec::new(), run)?;
        *self.record.lock() = Record::At { point, time };
        Ok(())
    }

    /// Makes a stream wait for the event as last recorded; without a record that is nothing.
    pub fn hold_back(&self, stream: &Arc<Stream>) -> Outcome<()> {
        let record = self.record.lock().clone();
        match record {
            Record::Captured(mark) => graph::join(stream, &mark),
            Record::Never => graph::refuse_outside_event(stream, false),
            Record::At { point, .. } => {
                graph::refuse_outside_event(stream, true)?;
                stream.push(vec![point], Arc::new(|_: Option<&Fault>| Ok(()))).map(drop)
            }
        }
    }

    /// The point at which the event happens, for a wait or question that captures may forbid.
    fn point(&self, what: &str) -> Outcome<Option<Point>> {
        let record = self.record.lock().clone();
        match record {
            Record::Captured(mark) => Err(graph::captured_event(&mark, true)),
            Record::Never => graph::refuse_unsafe(what).map(|()| None),
            Record::At { point, .. } => graph::refuse_unsafe(what).map(|()| Some(point)),
        }
    }

    /// Waits for the event.
    pub fn synchronize(&self) -> Outcome<()> {
        if let Some(point) = self.point("a wait for an event")? {
            point.host_wait();
        }
        device::selected().check()
    }

    /// Fails with `cudaErrorNotReady` while the event has not happened.
    pub fn query(&self) -> Outcome<()> {
        match self.point("a question about an event")? {
            Some(point) if !point.host_reached() => {
                Err(Fault::cuda(cudaErrorNotReady, "the event has not happened yet"))
            }
            _ => device::selected().check(),
        }
    }

    /// Milliseconds from `start` to `self`.
    pub fn since(&self, start: &Event) -> Outcome<f32> {
        let mut times = [None; 2];
        for (event, time) in [start, self].into_iter().zip(&mut times) {
            let record = event.record.lock().clone();
            let (point, stamp) = match record {
                Record::Captured(mark) => return Err(graph::captured_event(&mark, false)),
                Record::At { point, time } if event.timing => (point, time),
                _ => {
                    let text = "the event was never recorded or was created without timing";
                    return Err(Fault::cuda(cudaErrorInvalidResourceHandle, text));
                }
            };
            if !point.host_reached() {
                return Err(Fault::cuda(cudaErrorNotReady, "an event has not happened yet"));
            }
            *time = *stamp.lock();
        }
        match times {
            [Some(start), Some(end)] if end >= start => Ok((end - start).as_secs_f32() * 1e3),
            [Some(start), Some(end)] => Ok(-(start - end).as_secs_f32() * 1e3),
            _ => device::selected().check().map(|()| 0.0),
        }
    }
}
