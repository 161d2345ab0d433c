//! The items of a run: the same bytes for both sides.

use std::fmt::Write as _;

/// One item: its key and its input as JSON text.
pub(crate) struct Item {
    pub(crate) key: String,
    pub(crate) input: String,
}

/// `count` items whose inputs are JSON strings of `bytes` bytes that do not compress to nothing.
pub(crate) fn make(count: u32, bytes: u32) -> Vec<Item> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let length = usize::try_from(bytes).expect("a usize has at least 32 bits");
    (0..count)
        .map(|n| {
            let mut input = String::with_capacity(length + 16);
            input.push('"');
            while input.len() < length - 1 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let _ = write!(input, "{:08x}", state >> 32);
            }
            input.truncate(length - 1);
            input.push('"');
            Item { key: format!("item-{n:08}"), input }
        })
        .collect()
}

/// The items as a submitter writes them.
pub(crate) fn jsonl(items: &[Item]) -> Vec<u8> {
    let mut lines = String::new();
    for item in items {
        let _ = writeln!(lines, r#"{{"key":"{}","input":{}}}"#, item.key, item.input);
    }
    lines.into_bytes()
}
