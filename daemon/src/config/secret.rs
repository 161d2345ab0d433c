//! URLs that may carry a password.

use std::fmt;
use std::str::FromStr;
use std::sync::LazyLock;

use regex::Regex;

/// A `PostgreSQL` URL. Prints without its passwords, also in errors and in `Debug`.
#[derive(Clone, PartialEq, Eq)]
pub struct DatabaseUrl(String);

/// The address of a collector. Prints without its password.
#[derive(Clone, PartialEq, Eq)]
pub struct EndpointUrl(String);

macro_rules! secret_url {
    ($name:ident, $schemes:expr, $refusal:literal, $check:expr) => {
        impl $name {
            /// The whole URL with its password, for connecting; not for people.
            #[must_use]
            pub fn expose(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = String;

            /// The error never holds the text, which may be a secret.
            fn from_str(text: &str) -> Result<Self, String> {
                let known = $schemes.iter().any(|scheme: &&str| {
                    text.strip_prefix(scheme).is_some_and(|rest| !rest.is_empty())
                });
                if !known || text.chars().any(|c| c.is_whitespace() || c.is_control()) {
                    return Err($refusal.to_owned());
                }
                $check(text)?;
                Ok(Self(text.to_owned()))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&redacted(&self.0))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:?}", redacted(&self.0))
            }
        }
    };
}

secret_url!(
    DatabaseUrl,
    ["postgres://", "postgresql://"],
    "is not a database URL such as postgres://user:password@host:5432/name",
    driver_reads
);
secret_url!(
    EndpointUrl,
    ["http://", "https://"],
    "is not a URL that begins with http:// or https://",
    |_: &str| Ok::<(), String>(())
);

impl DatabaseUrl {
    /// The modes of libpq that look at the server's certificate, which the driver does not know.
    pub const VERIFYING: [&str; 2] = ["sslmode=verify-full", "sslmode=verify-ca"];

    /// The URL as the driver reads it, and whether the server's certificate has to be looked at.
    #[must_use]
    pub fn for_driver(url: &str) -> (String, bool) {
        let verify = Self::VERIFYING.iter().any(|mode| url.contains(mode));
        let url = Self::VERIFYING
            .iter()
            .fold(url.to_owned(), |url, mode| url.replace(mode, "sslmode=require"));
        (url, verify)
    }
}

/// What the driver says of a URL, in its own words: they name a parameter, never its value.
fn driver_reads(url: &str) -> Result<(), String> {
    let parsed = DatabaseUrl::for_driver(url).0.parse::<tokio_postgres::Config>();
    parsed.map(drop).map_err(|error| match std::error::Error::source(&error) {
        Some(cause) => format!("is not a database URL: {cause}"),
        None => format!("is not a database URL: {error}"),
    })
}

/// The URL with its passwords replaced. It rather hides too much: a password may hold a `/`, `?` or
/// `@` that should have been escaped, so everything up to the last `@` may be one.
fn redacted(url: &str) -> String {
    static USER: LazyLock<Regex> = LazyLock::new(|| pattern("^([a-z]+://[^:]*):.*@"));
    static PARAMETER: LazyLock<Regex> = LazyLock::new(|| pattern("([?&](?:ssl)?password=)[^&]*"));

    let url = USER.replace(url, "$1:***@");
    PARAMETER.replace_all(&url, "$1***").into_owned()
}

fn pattern(text: &str) -> Regex {
    Regex::new(text).expect("the patterns are literals under test")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_never_print() {
        for (url, shown) in [
            ("postgres://u:hunter2@h:5432/d", "postgres://u:***@h:5432/d"),
            ("postgres://u:hunt/er2@h/d", "postgres://u:***@h/d"),
            ("postgres://u:h@unter2?@h/d", "postgres://u:***@h/d"),
            (
                "postgres://u@h/d?sslmode=require&password=hunter2",
                "postgres://u@h/d?sslmode=require&password=***",
            ),
            ("postgres://h/d?password=hunt@er2&a=b", "postgres://h/d?password=***&a=b"),
            ("postgresql:///d?host=/run/pg", "postgresql:///d?host=/run/pg"),
            ("postgres://h1:1,h2:2/d", "postgres://h1:1,h2:2/d"),
        ] {
            let held = DatabaseUrl(url.to_owned());
            assert_eq!(held.to_string(), shown);
            assert_eq!(format!("{held:?}"), format!("{shown:?}"));
        }
    }

    #[test]
    fn what_the_driver_reads_is_kept_as_it_is() {
        for url in [
            "postgres://u:hunter2@h:5432/d",
            "postgres://u@h/d?sslmode=require&password=hunter2",
            "postgres://u@h/d?sslmode=verify-full",
            "postgresql:///d?host=/run/pg",
            "postgres://h1:1,h2:2/d",
        ] {
            assert_eq!(url.parse::<DatabaseUrl>().unwrap().expose(), url);
        }
    }

    #[test]
    fn a_refused_url_is_not_repeated_in_the_error() {
        for bad in [
            "host=h password=hunter2",
            "mysql://u:hunter2@h",
            "postgres://u:hunter2 @h/d",
            "postgres://u:hunter2@h:port/d",
            "postgres://u:hunter2@h/d?sslmode=hunter2",
            "postgres://u:hunter2@h/d?hunter=1",
        ] {
            let error = bad.parse::<DatabaseUrl>().unwrap_err();
            assert!(!error.contains("hunter2"), "{error}");
        }
        assert!("postgres://".parse::<DatabaseUrl>().is_err());
        assert!("localhost:4317".parse::<EndpointUrl>().is_err());
        assert!("https://user:pw@collector".parse::<EndpointUrl>().is_ok());
    }
}
