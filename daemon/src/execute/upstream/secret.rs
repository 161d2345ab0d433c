//! Secrets at the moment of their use.

use std::io;

use reqwest::header::{HeaderMap, HeaderName, HeaderValue};

use crate::config::SecretRef;

/// The shortest secret that is looked for in texts, in bytes.
const SHORTEST: usize = 6;

/// A secret that cannot be had. The operator has to set it.
#[derive(Debug, thiserror::Error)]
pub(in crate::execute) enum SecretError {
    /// The variable is not set, or not text.
    #[error("the environment variable {0} of the worker is not set")]
    NoVariable(String),
    /// The file cannot be read.
    #[error("the secret file {path} cannot be read: {source}")]
    File {
        /// Which.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// It is empty, or holds what no header can.
    #[error("the secret in {0} is empty or holds characters that no header can")]
    Unusable(String),
}

/// The headers of one request that are secret, and how to hide them in what comes back.
#[derive(Default)]
pub(in crate::execute) struct Secrets {
    pub(super) headers: HeaderMap,
    values: Vec<String>,
}

impl Secrets {
    /// Adds a header whose value is `prefix` and the secret.
    pub(in crate::execute) fn add(
        &mut self,
        name: HeaderName,
        prefix: &str,
        secret: &SecretRef,
    ) -> Result<(), SecretError> {
        let text = read(secret)?;
        let place = || if secret.file.is_empty() { &secret.env } else { &secret.file };
        let mut value = HeaderValue::try_from(format!("{prefix}{text}"))
            .ok()
            .filter(|_| !text.is_empty())
            .ok_or_else(|| SecretError::Unusable(place().clone()))?;
        value.set_sensitive(true);
        self.headers.insert(name, value);
        self.values.push(text);
        Ok(())
    }

    /// The text with every secret in it replaced: an upstream may repeat what it was sent. What is
    /// too short to be told from other text is left.
    pub(in crate::execute) fn redact(&self, text: String) -> String {
        let hide = |text: String, secret: &String| {
            if secret.len() >= SHORTEST && text.contains(secret.as_str()) {
                text.replace(secret.as_str(), "***")
            } else {
                text
            }
        };
        self.values.iter().fold(text, hide)
    }
}

fn read(secret: &SecretRef) -> Result<String, SecretError> {
    if secret.file.is_empty() {
        let value = std::env::var(&secret.env);
        return value.map_err(|_| SecretError::NoVariable(secret.env.clone()));
    }
    let text = std::fs::read_to_string(&secret.file)
        .map_err(|source| SecretError::File { path: secret.file.clone(), source })?;
    Ok(text.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(path: &std::path::Path) -> SecretRef {
        SecretRef { env: String::new(), file: path.to_str().unwrap().to_owned() }
    }

    #[test]
    fn a_secret_is_read_at_its_use_and_hidden_in_what_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        let mut secrets = Secrets::default();
        let name = HeaderName::from_static("authorization");
        assert!(secrets.add(name.clone(), "Bearer ", &at(&path)).is_err(), "no such file");
        std::fs::write(&path, "hunter2\n").unwrap();

        secrets.add(name.clone(), "Bearer ", &at(&path)).unwrap();

        let value = &secrets.headers[&name];
        assert_eq!((value.to_str().unwrap(), value.is_sensitive()), ("Bearer hunter2", true));
        assert!(!format!("{:?}", secrets.headers).contains("hunter2"));
        assert_eq!(secrets.redact("key hunter2!".to_owned()), "key ***!");
    }

    #[test]
    fn what_is_no_header_is_refused_without_being_repeated() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        for bad in ["", "\n", "hunter2\nx"] {
            std::fs::write(&path, bad).unwrap();
            let name = HeaderName::from_static("x-key");
            let error = Secrets::default().add(name, "", &at(&path)).unwrap_err();
            assert!(!error.to_string().contains("hunter2"), "{error}");
        }
    }
}
