//! How settings are written: durations, sizes, words, and the values that mean "not set".

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serializer};

use crate::model::QueueName;

/// Reads a text with `parse`; anything else is a type error that names `expecting`.
struct Text<T> {
    expecting: &'static str,
    parse: fn(&str) -> Result<T, String>,
}

impl<T> Visitor<'_> for Text<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expecting)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        (self.parse)(text).map_err(E::custom)
    }
}

/// Durations such as `"60s"` or `"1h 30m"`.
pub(super) mod duration {
    use super::{Deserializer, Duration, Serializer, Text};

    pub(in crate::config) fn serialize<S: Serializer>(
        duration: &Duration,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_str(&humantime::format_duration(*duration))
    }

    pub(in crate::config) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Duration, D::Error> {
        from.deserialize_str(Text { expecting: "a duration such as \"60s\"", parse })
    }

    fn parse(text: &str) -> Result<Duration, String> {
        humantime::parse_duration(text)
            .map_err(|_| format!("{text:?} is not a duration such as \"250ms\", \"60s\" or \"1h\""))
    }
}

/// Sizes such as `"1MiB"`, or whole numbers of bytes.
pub(super) mod size {
    use super::{Deserializer, Error, Serializer, Visitor, fmt};

    const UNITS: [(&str, u64); 7] = [
        ("GiB", 1 << 30),
        ("MiB", 1 << 20),
        ("KiB", 1 << 10),
        ("GB", 1_000_000_000),
        ("MB", 1_000_000),
        ("kB", 1_000),
        ("B", 1),
    ];

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes the field by reference")]
    pub(in crate::config) fn serialize<S: Serializer>(
        size: &usize,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_str(&show(*size))
    }

    pub(in crate::config) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<usize, D::Error> {
        struct Size;
        impl Visitor<'_> for Size {
            type Value = usize;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size such as \"1MiB\" or a whole number of bytes")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<usize, E> {
                parse(text).map_err(E::custom)
            }

            fn visit_u64<E: Error>(self, bytes: u64) -> Result<usize, E> {
                usize::try_from(bytes).map_err(|_| E::custom("more than this machine can address"))
            }

            fn visit_i64<E: Error>(self, bytes: i64) -> Result<usize, E> {
                usize::try_from(bytes).map_err(|_| E::custom("a size is not negative"))
            }
        }
        from.deserialize_any(Size)
    }

    /// The size in the largest binary unit that leaves no rest.
    pub(in crate::config) fn show(size: usize) -> String {
        let bytes = size as u64;
        UNITS[..3]
            .iter()
            .find(|(_, unit)| bytes > 0 && bytes.is_multiple_of(*unit))
            .map_or_else(|| bytes.to_string(), |(name, unit)| format!("{}{name}", bytes / unit))
    }

    fn parse(text: &str) -> Result<usize, String> {
        let (number, unit) = UNITS
            .iter()
            .find_map(|(name, unit)| Some((text.strip_suffix(name)?.trim_end(), *unit)))
            .unwrap_or((text, 1));
        Some(number)
            .filter(|number| number.bytes().all(|b| b.is_ascii_digit()))
            .and_then(|number| number.parse::<u64>().ok()?.checked_mul(unit))
            .and_then(|bytes| usize::try_from(bytes).ok())
            .ok_or_else(|| {
                format!("{text:?} is not a size such as \"512KiB\", \"1MiB\" or a number of bytes")
            })
    }
}

/// A number whose 0 means "unlimited".
pub(super) mod unlimited {
    use std::num::NonZeroU32;

    use super::{Deserialize, Deserializer, Serializer};

    #[expect(
        clippy::trivially_copy_pass_by_ref,
        clippy::ref_option,
        reason = "serde passes the field by reference"
    )]
    pub(in crate::config) fn serialize<S: Serializer>(
        limit: &Option<NonZeroU32>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.serialize_u32(limit.map_or(0, NonZeroU32::get))
    }

    pub(in crate::config) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<NonZeroU32>, D::Error> {
        u32::deserialize(from).map(NonZeroU32::new)
    }
}

/// One of a few words. Not by derive: that would take a variant's number for it as well.
pub(super) fn word<'de, D: Deserializer<'de>, T>(from: D) -> Result<T, D::Error>
where
    T: FromStr<Err = String>,
{
    from.deserialize_str(Text { expecting: "a text", parse: T::from_str })
}

/// A list of queue names.
pub(super) fn queue_names<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<QueueName>, D::Error> {
    let names = Vec::<String>::deserialize(from)?;
    names.iter().map(|name| name.parse().map_err(D::Error::custom)).collect()
}

/// An address and port, or an empty text for none.
pub(super) fn address<'de, D: Deserializer<'de>>(from: D) -> Result<Option<SocketAddr>, D::Error> {
    let parse = |text: &str| match text {
        "" => Ok(None),
        text => text
            .parse()
            .map(Some)
            .map_err(|_| format!("{text:?} is not an address and port such as \"127.0.0.1:9464\"")),
    };
    from.deserialize_str(Text { expecting: "a text", parse })
}

/// A text that may be empty, which means "not set".
pub(super) mod optional {
    use std::fmt::Display;

    use super::{Deserializer, FromStr, Serializer, Text};

    #[expect(clippy::ref_option, reason = "serde passes the field by reference")]
    pub(in crate::config) fn serialize<S: Serializer, T: Display>(
        value: &Option<T>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => to.collect_str(value),
            None => to.serialize_str(""),
        }
    }

    pub(in crate::config) fn deserialize<'de, D: Deserializer<'de>, T>(
        from: D,
    ) -> Result<Option<T>, D::Error>
    where
        T: FromStr,
        T::Err: Display,
    {
        let parse = |text: &str| match text {
            "" => Ok(None),
            text => text.parse().map(Some).map_err(|e: T::Err| e.to_string()),
        };
        from.deserialize_str(Text { expecting: "a text", parse })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde::Serialize;

    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Sample {
        #[serde(with = "duration")]
        time: Duration,
        #[serde(with = "size")]
        size: usize,
    }

    fn size_of(json: &str) -> Result<usize, String> {
        serde_json::from_str::<Sample>(&format!(r#"{{"time": "1s", "size": {json}}}"#))
            .map(|sample| sample.size)
            .map_err(|e| e.to_string())
    }

    #[test]
    fn sizes_are_numbers_of_bytes_or_carry_a_unit() {
        for (json, bytes) in [
            ("17", 17),
            ("\"17\"", 17),
            ("\"17B\"", 17),
            ("\"2kB\"", 2_000),
            ("\"2KiB\"", 2_048),
            ("\"3 MiB\"", 3 << 20),
            ("\"1GB\"", 1_000_000_000),
        ] {
            assert_eq!(size_of(json), Ok(bytes), "{json}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for json in
            ["-1", "1.5", "true", "\"\"", "\"MiB\"", "\"-1\"", "\"+1\"", "\"1mib\"", "\"1.5MiB\""]
        {
            assert!(size_of(json).is_err(), "{json}");
        }
        assert!(size_of("\"99999999999GiB\"").is_err());
    }

    proptest! {
        #[test]
        fn what_is_written_reads_the_same(
            secs in 0u64..1 << 40,
            nanos in 0u32..1_000_000_000,
            size in prop_oneof![any::<usize>(), (0usize..4096).prop_map(|n| n << 20)],
        ) {
            let sample = Sample { time: Duration::new(secs, nanos), size };
            let json = serde_json::to_string(&sample).unwrap();
            prop_assert_eq!(serde_json::from_str::<Sample>(&json).unwrap(), sample);
        }
    }
}
