//! NCCL EP's own environment variables: read as it reads them, compared between the ranks where they change what ranks
//! share, and refused where NCCL EP would fail, or hang, over them.

use super::Lookup;
use crate::error::{Error, Result};

/// Blocks of dispatch, for builds that know them in this order.
pub(crate) const DISPATCH_COUNTS: [&str; 2] = [super::DISPATCH_SMS, "NCCL_EP_COMM_SMS"];
pub(crate) const COMBINE_SMS: &str = "NCCL_EP_COMBINE_SMS";
pub(crate) const SHUFFLE_SMS: &str = "NCCL_EP_SHUFFLE_SMS";
pub(crate) const PREPROCESS_SMS: &str = "NCCL_EP_PREPROCESS_NUM_SMS";
const TOKENS_PER_CHUNK: &str = "NCCL_EP_TOKENS_PER_CHUNK";

const LOCAL_DUP: &str = "NCCL_EP_HT_EM_LOCAL_DUP";
const NVLINK_DUP: &str = "NCCL_EP_HT_EM_NVLINK_DUP";

/// Numbers that must be equal on all ranks: peers wait for the same block, or divide their tokens alike.
const EQUAL_COUNTS: [&str; 4] = [DISPATCH_COUNTS[0], DISPATCH_COUNTS[1], COMBINE_SMS, TOKENS_PER_CHUNK];

/// Flags that must be: they choose another algorithm, or leave a hand-shake out. The second is what an unset one counts as.
const EQUAL_FLAGS: [(&str, bool); 7] = [
    (LOCAL_DUP, false),
    (NVLINK_DUP, false),
    // Set by `GroupVariables` where it is unset.
    (super::SCAN_MODE, true),
    ("NCCL_EP_DISABLE_GUARD", false),
    ("NCCL_EP_HT_EM_COUNT_UNFUSED", false),
    ("NCCL_EP_HT_EM_PULL_PUSH", false),
    ("NCCL_EP_HT_UNFUSED_SYNC", false),
];

/// The numbers for the agreement, by name.
pub(crate) fn agreed(env: Lookup<'_>) -> Vec<(String, u64)> {
    // What does not parse was refused by `check` on its rank.
    let counts = EQUAL_COUNTS.map(|name| {
        let count = count(name, env).ok().flatten().map_or(-1, i64::from);
        (format!("{name} in the environment (-1 = unset)"), count as u64)
    });
    let flags = EQUAL_FLAGS.map(|(name, unset)| {
        let flag = flag(name, env).ok().flatten().unwrap_or(unset);
        (format!("{name} in the environment"), flag.into())
    });
    counts.into_iter().chain(flags).collect()
}

/// # Errors
/// A variable that does not parse or is out of range, or variables that exclude each other.
pub(crate) fn check(env: Lookup<'_>, sm_count: u32) -> Result<()> {
    for (name, _) in EQUAL_FLAGS {
        flag(name, env)?;
    }
    count(TOKENS_PER_CHUNK, env)?;
    // What is too much of these two is lowered, not refused: another library may have set them.
    for name in [SHUFFLE_SMS, PREPROCESS_SMS] {
        count(name, env)?;
    }
    for name in DISPATCH_COUNTS.into_iter().chain([COMBINE_SMS]) {
        if let Some(count) = count(name, env)?.filter(|count| *count > sm_count) {
            let required = format!("must be at most {sm_count}, the device's multiprocessors");
            return Err(Error::argument(name, required, count));
        }
    }
    if flag(LOCAL_DUP, env)? == Some(true) && flag(NVLINK_DUP, env)? == Some(true) {
        return Err(Error::argument(LOCAL_DUP, format!("must not be on together with {NVLINK_DUP}"), "both"));
    }
    Ok(())
}

/// A number of 1 or more; none where it is unset.
pub(crate) fn count(name: &str, env: Lookup<'_>) -> Result<Option<u32>> {
    let Some(value) = env(name).filter(|value| !value.is_empty()) else { return Ok(None) };
    let parsed = value.to_str().and_then(|text| text.trim().parse().ok());
    let number = parsed.filter(|number| (1..=i32::MAX as u32).contains(number));
    number.map(Some).ok_or_else(|| Error::argument(name, "must be a number of 1 or more", value.display()))
}

fn flag(name: &str, env: Lookup<'_>) -> Result<Option<bool>> {
    let Some(value) = env(name).filter(|value| !value.is_empty()) else { return Ok(None) };
    match value.to_string_lossy().to_ascii_lowercase().as_str() {
        "1" | "on" | "true" => Ok(Some(true)),
        "0" | "off" | "false" => Ok(Some(false)),
        _ => Err(Error::argument(name, "must be 1, on or true, or 0, off or false", value.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;

    fn with<R>(pairs: &[(&str, &str)], ask: impl Fn(Lookup<'_>) -> R) -> R {
        ask(&|name| pairs.iter().find(|(n, _)| *n == name).map(|(_, value)| OsString::from(value)))
    }

    #[test]
    fn what_nccl_ep_would_fail_over_is_refused() {
        let refused = |pairs: &[(&str, &str)]| with(pairs, |env| check(env, 132)).unwrap_err().to_string();
        with(&[], |env| check(env, 132)).unwrap();
        with(&[("NCCL_EP_COMM_SMS", "132"), (LOCAL_DUP, "On"), (NVLINK_DUP, "0")], |env| check(env, 132)).unwrap();
        assert_eq!(
            refused(&[(LOCAL_DUP, "1"), (NVLINK_DUP, "true")]),
            "NCCL_EP_HT_EM_LOCAL_DUP must not be on together with NCCL_EP_HT_EM_NVLINK_DUP, got both"
        );
        for name in ["NCCL_EP_COMM_SMS", "NCCL_EP_COMBINE_SMS"] {
            let text = refused(&[(name, "133")]);
            assert_eq!(text, format!("{name} must be at most 132, the device's multiprocessors, got 133"));
        }
        for name in ["NCCL_EP_COMBINE_SMS", "NCCL_EP_SHUFFLE_SMS", "NCCL_EP_PREPROCESS_NUM_SMS"] {
            assert_eq!(refused(&[(name, "0")]), format!("{name} must be a number of 1 or more, got 0"));
        }
        assert_eq!(
            refused(&[(TOKENS_PER_CHUNK, "64k")]),
            format!("{TOKENS_PER_CHUNK} must be a number of 1 or more, got 64k")
        );
        let text = refused(&[("NCCL_EP_DISABLE_GUARD", "maybe")]);
        assert_eq!(text, "NCCL_EP_DISABLE_GUARD must be 1, on or true, or 0, off or false, got maybe");
    }

    #[test]
    fn what_ranks_share_is_compared() {
        let unset = with(&[], agreed);
        assert_eq!(
            unset,
            with(&[(super::super::SCAN_MODE, "1"), (NVLINK_DUP, "off")], agreed),
            "these are the defaults"
        );
        for (name, value) in [
            ("NCCL_EP_COMM_SMS", "16"),
            (TOKENS_PER_CHUNK, "128"),
            (LOCAL_DUP, "1"),
            (NVLINK_DUP, "1"),
            ("NCCL_EP_DISABLE_GUARD", "on"),
            (super::super::SCAN_MODE, "0"),
        ] {
            let set = with(&[(name, value)], agreed);
            let different: Vec<_> = set.iter().zip(&unset).filter(|(a, b)| a != b).map(|(a, _)| &a.0).collect();
            assert_eq!(different.len(), 1);
            assert!(different[0].starts_with(name), "{different:?}");
        }
        let of = |pairs, name: &str| {
            let all = with(pairs, agreed);
            all.iter().find(|(text, _)| text.starts_with(name)).unwrap().1 as i64
        };
        assert_eq!((of(&[], TOKENS_PER_CHUNK), of(&[(TOKENS_PER_CHUNK, " 64 ")], TOKENS_PER_CHUNK)), (-1, 64));
    }
}
