//! Tokens as an upstream counts them. What it does not say stays unknown; it is never zero.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Tokens of one call or of several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens read.
    pub input_tokens: Option<u64>,
    /// Tokens written.
    pub output_tokens: Option<u64>,
    /// Both, as the upstream sums them.
    pub total_tokens: Option<u64>,
    /// Of those read, what came from its cache.
    pub cached_tokens: Option<u64>,
    /// Of those written, what was reasoning.
    pub reasoning_tokens: Option<u64>,
}

impl Usage {
    /// The usage in an answer's body, in the words of chat completions, completions, embeddings or
    /// responses; none where there is none. What is odd is left out.
    #[must_use]
    pub fn of(body: &Value) -> Option<Self> {
        let usage = body.get("usage")?.as_object()?;
        let number = |names: [&str; 2]| names.iter().find_map(|name| usage.get(*name)?.as_u64());
        let detail = |tables: [&str; 2], name: &str| {
            tables.iter().find_map(|table| usage.get(*table)?.get(name)?.as_u64())
        };
        let input_tokens = number(["prompt_tokens", "input_tokens"]);
        let output_tokens = number(["completion_tokens", "output_tokens"]);
        let both = input_tokens.zip(output_tokens).map(|(read, written)| read + written);
        let found = Self {
            input_tokens,
            output_tokens,
            total_tokens: usage.get("total_tokens").and_then(Value::as_u64).or(both),
            cached_tokens: detail(
                ["prompt_tokens_details", "input_tokens_details"],
                "cached_tokens",
            ),
            reasoning_tokens: detail(
                ["completion_tokens_details", "output_tokens_details"],
                "reasoning_tokens",
            ),
        };
        (found != Self::default()).then_some(found)
    }

    /// Adds another call's; what neither says stays unknown.
    pub fn add(&mut self, other: Self) {
        let sum = |a: Option<u64>, b: Option<u64>| match (a, b) {
            (None, None) => None,
            (a, b) => Some(a.unwrap_or(0).saturating_add(b.unwrap_or(0))),
        };
        *self = Self {
            input_tokens: sum(self.input_tokens, other.input_tokens),
            output_tokens: sum(self.output_tokens, other.output_tokens),
            total_tokens: sum(self.total_tokens, other.total_tokens),
            cached_tokens: sum(self.cached_tokens, other.cached_tokens),
            reasoning_tokens: sum(self.reasoning_tokens, other.reasoning_tokens),
        };
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn both_dialects_are_read() {
        let chat = Usage::of(&json!({"usage": {"prompt_tokens": 7, "completion_tokens": 3,
            "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": {"reasoning_tokens": 1}}}));
        let responses = Usage::of(&json!({"usage": {"input_tokens": 7, "output_tokens": 3,
            "input_tokens_details": {"cached_tokens": 2},
            "output_tokens_details": {"reasoning_tokens": 1}}}));
        assert_eq!(chat, responses);
        assert_eq!(chat.unwrap().total_tokens, Some(10));
    }

    #[test]
    fn what_is_absent_or_odd_stays_unknown_and_spoils_no_sum() {
        for none in [
            json!({}),
            json!({"usage": null}),
            json!({"usage": []}),
            json!({"usage": {"prompt_tokens": "7", "total_tokens": -1}}),
            json!("usage"),
        ] {
            assert_eq!(Usage::of(&none), None, "{none}");
        }
        let mut sum = Usage::default();
        sum.add(Usage { input_tokens: Some(5), ..Usage::default() });
        sum.add(Usage { input_tokens: Some(6), output_tokens: Some(u64::MAX), ..Usage::default() });
        sum.add(Usage { output_tokens: Some(9), ..Usage::default() });
        assert_eq!((sum.input_tokens, sum.output_tokens), (Some(11), Some(u64::MAX)));
        assert_eq!(sum.total_tokens, None);
    }
}
