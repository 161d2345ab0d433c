//! Chat completions, as servers really send them.

use serde_json::{Value, json};

use crate::execute::upstream::usage::Usage;

/// One call of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ToolCall {
    pub(super) id: String,
    pub(super) name: String,
    /// JSON text, as the model wrote it.
    pub(super) arguments: String,
}

/// What a model answered.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Reply {
    /// Its message, as it goes into the history.
    pub(super) message: Value,
    /// The tools it calls. They decide what comes next, whatever the finish reason says.
    pub(super) calls: Vec<ToolCall>,
    pub(super) text: String,
    pub(super) finish_reason: String,
    pub(super) usage: Option<Usage>,
    /// The model, by the server's word.
    pub(super) model: Option<String>,
}

impl Reply {
    /// Reads an answer; none where it is no chat completion. `turn` makes the ids of calls that have
    /// none, or one that another call of the same answer has.
    pub(super) fn of(body: &Value, turn: u32) -> Option<Self> {
        let choice = body.get("choices")?.get(0)?;
        let mut message = choice.get("message").filter(|message| message.is_object())?.clone();
        message["role"] = "assistant".into();
        let mut calls = Vec::new();
        if let Some(asked) = message.get_mut("tool_calls").and_then(Value::as_array_mut) {
            for (n, call) in asked.iter_mut().filter(|call| call.is_object()).enumerate() {
                calls.push(read_call(call, &calls, turn, n));
            }
        }
        if calls.is_empty()
            && let Some(message) = message.as_object_mut()
        {
            // Servers refuse an empty list in the history that they sent themselves.
            message.remove("tool_calls");
        }
        Some(Self {
            text: text_of(message.get("content")),
            message,
            calls,
            finish_reason: choice["finish_reason"].as_str().unwrap_or_default().to_owned(),
            usage: Usage::of(body),
            model: body.get("model").and_then(Value::as_str).map(str::to_owned),
        })
    }
}

fn read_call(call: &mut Value, before: &[ToolCall], turn: u32, n: usize) -> ToolCall {
    let id = call.get("id").and_then(Value::as_str).unwrap_or_default().to_owned();
    let id = if id.is_empty() || before.iter().any(|other| other.id == id) {
        let id = format!("call_{turn}_{n}");
        call["id"] = id.clone().into();
        id
    } else {
        id
    };
    let function = &call["function"];
    let name = function["name"].as_str().unwrap_or_default().to_owned();
    let arguments = match &function["arguments"] {
        Value::String(text) => text.clone(),
        // Some servers parse them; nothing at all is an empty object.
        Value::Null => "{}".to_owned(),
        Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => {
            function["arguments"].to_string()
        }
    };
    ToolCall { id, name, arguments }
}

/// The text of a content that is a text or a list of parts.
fn text_of(content: Option<&Value>) -> String {
    match content {
        Some(Value::String(text)) => text.trim().to_owned(),
        Some(Value::Array(parts)) => {
            let texts = parts.iter().filter_map(|part| part.get("text")?.as_str());
            texts.collect::<Vec<_>>().join("").trim().to_owned()
        }
        Some(Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_)) | None => {
            String::new()
        }
    }
}

/// The message that answers a call.
pub(super) fn tool_message(id: &str, content: &str) -> Value {
    json!({"role": "tool", "tool_call_id": id, "content": content})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(message: &Value, finish_reason: &str) -> Reply {
        let body = json!({"choices": [{"message": message, "finish_reason": finish_reason}]});
        Reply::of(&body, 3).unwrap()
    }

    #[test]
    fn calls_are_seen_whatever_the_finish_reason_says() {
        let call = json!({"id": "a", "function": {"name": "shell", "arguments": "{}"}});
        let message = json!({"role": "assistant", "content": null, "tool_calls": [call]});
        let stopped = reply(&message, "stop");
        assert_eq!(stopped.calls.len(), 1);
        assert_eq!(stopped.message, message, "unchanged in the history");
        let none = reply(&json!({"content": "done", "tool_calls": []}), "tool_calls");
        assert_eq!((none.calls.len(), none.text.as_str()), (0, "done"));
        assert_eq!(none.message, json!({"role": "assistant", "content": "done"}));
    }

    #[test]
    fn missing_and_repeated_ids_are_made_up() {
        let call = |id: Value| json!({"id": id, "function": {"name": "shell", "arguments": "{}"}});
        let calls = [call("a".into()), call("a".into()), call(Value::Null), json!({})];
        let reply = reply(&json!({"content": "", "tool_calls": calls}), "tool_calls");
        let ids: Vec<&str> = reply.calls.iter().map(|call| call.id.as_str()).collect();
        assert_eq!(ids, ["a", "call_3_1", "call_3_2", "call_3_3"]);
        assert_eq!(reply.message["tool_calls"][1]["id"], "call_3_1", "in the history too");
        assert_eq!(reply.calls[3].name, "");
    }

    #[test]
    fn odd_answers_are_read_as_far_as_they_go() {
        assert_eq!(
            reply(&json!({"content": [{"text": "a"}, {"x": 1}, {"text": "b"}]}), "").text,
            "ab"
        );
        let parsed = json!({"function": {"name": "shell", "arguments": {"command": "ls"}}});
        let parsed = reply(&json!({"tool_calls": [parsed, 7]}), "");
        assert_eq!(parsed.calls[0].arguments, r#"{"command":"ls"}"#);
        assert_eq!(parsed.calls.len(), 1);
        for none in [json!({}), json!({"choices": []}), json!({"choices": [{"message": "x"}]})] {
            assert_eq!(Reply::of(&none, 1), None, "{none}");
        }
    }
}
