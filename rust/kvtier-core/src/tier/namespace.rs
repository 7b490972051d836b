//! The namespace of a manager in its canonical form: how tiers know whose data they hold.
//!
//! The engine writes model, revision, dtype, layout, block hash, rotary embedding and parallel shape into it
//! (`docs/file-format.md`). Equal namespaces have equal texts here, whatever the order of their
//! fields was.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::checksum::Checksum;

/// A namespace as the JSON it is, or as a text if it is none.
pub(super) fn value_of(namespace: &str) -> Value {
    serde_json::from_str(namespace).unwrap_or_else(|_| namespace.to_owned().into())
}

/// The checksum of a value in its canonical form.
pub(super) fn checksum_of(value: &Value) -> Checksum {
    let mut canonical = String::new();
    write_canonical(value, &mut canonical);
    Checksum::of(canonical.as_bytes())
}

/// JSON with sorted keys and no spaces. Not left to the map of `serde_json`, whose order is a
/// feature that any crate of a program may switch.
fn write_canonical(value: &Value, text: &mut String) {
    let mut list = |open, close, items: &mut dyn Iterator<Item = (Option<&str>, &Value)>| {
        text.push(open);
        for (position, (name, item)) in items.enumerate() {
            if position > 0 {
                text.push(',');
            }
            if let Some(name) = name {
                text.push_str(&Value::from(name).to_string());
                text.push(':');
            }
            write_canonical(item, text);
        }
        text.push(close);
    };
    match value {
        Value::Object(fields) => {
            let sorted: BTreeMap<&str, &Value> =
                fields.iter().map(|(name, value)| (&**name, value)).collect();
            list('{', '}', &mut sorted.into_iter().map(|(name, value)| (Some(name), value)));
        }
        Value::Array(items) => list('[', ']', &mut items.iter().map(|item| (None, item))),
        leaf => text.push_str(&leaf.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn canonical_json_has_sorted_keys_and_no_spaces() {
        let mut text = String::new();
        let value = json!({"b": [true, {"z": 1.5, "y": "\""}], "a": {}});
        write_canonical(&value, &mut text);
        assert_eq!(text, r#"{"a":{},"b":[true,{"y":"\"","z":1.5}]}"#);
    }
}
