//! What is timed: a shape, the type of its rows, and who sends to whom.

use super::traffic::Kind;
use crate::routing::Problem;
use clap::ValueEnum;
use nvte_ep_core::ffi::types::{NVTEDType, kNVTEBFloat16, kNVTEFloat16, kNVTEFloat32};
use serde::{Deserialize, Serialize};

/// Values that share a scale in MXFP8.
pub const BLOCK: usize = 32;

/// In which type rows are dispatched. What is combined is bf16 for MXFP8, and the same for the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RowType {
    /// bfloat16.
    Bf16,
    /// IEEE 754 binary16.
    F16,
    /// IEEE 754 binary32.
    F32,
    /// 8-bit floats (E4M3) with a scale for each 32.
    Mxfp8,
}

impl RowType {
    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F32 => "f32",
            Self::Mxfp8 => "mxfp8",
        }
    }

    /// Bytes of a row that is combined.
    pub const fn combined_bytes(self, hidden: usize) -> usize {
        match self {
            Self::Bf16 | Self::F16 | Self::Mxfp8 => hidden * 2,
            Self::F32 => hidden * 4,
        }
    }

    /// Bytes of a row that is dispatched, with its scales.
    pub const fn dispatched_bytes(self, hidden: usize) -> usize {
        match self {
            Self::Mxfp8 => hidden + hidden / BLOCK,
            other => other.combined_bytes(hidden),
        }
    }

    /// The number that the C interface has for what is combined.
    pub const fn combined(self) -> NVTEDType {
        match self {
            Self::Bf16 | Self::Mxfp8 => kNVTEBFloat16,
            Self::F16 => kNVTEFloat16,
            Self::F32 => kNVTEFloat32,
        }
    }
}

/// One point of a sweep.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Case {
    /// The shape.
    #[serde(flatten)]
    pub problem: Problem,
    /// The rows' type.
    pub dtype: RowType,
    /// Who sends to whom.
    pub routing: Kind,
    /// SM cap of a rank, where the command line gives one.
    pub max_sms: Option<usize>,
}
