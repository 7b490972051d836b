//! Passwords and the like: usable, not printable.

use std::fmt;

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer};

/// A text that neither `Debug`, nor `Display`, nor an error of its parsing shows.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Takes a text over.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text itself, for whoever sends it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Takes a text. Serde's own messages for anything else show the value: a password of digits that
/// somebody wrote without quotes would be in the log.
struct TextOnly;

impl Visitor<'_> for TextOnly {
    type Value = Secret;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Secret, E> {
        Ok(Secret::new(text))
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<Secret, E> {
        Err(E::custom("a secret must be a text"))
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<Secret, E> {
        Err(E::custom("a secret must be a text: put it in quotes"))
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<Secret, E> {
        self.visit_i64(0)
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<Secret, E> {
        self.visit_i64(0)
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TextOnly)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn is_not_shown_by_anything_but_expose() {
        let secret: Secret = serde_json::from_value(json!("hunter2")).expect("a text");
        assert_eq!(secret.expose(), "hunter2");
        assert_eq!(format!("{secret} {secret:?} {:#?}", Some(&secret)).find("hunter2"), None);
    }

    #[test]
    fn is_not_shown_by_the_error_of_a_wrong_type() {
        for wrong in [json!(271_828), json!(-271_828), json!(271_828.5), json!(true), json!([1])] {
            let error = serde_json::from_value::<Secret>(wrong).expect_err("no text").to_string();
            assert!(!error.contains("271828") && error.contains("text"), "{error}");
        }
    }
}
