//! Whose data a store holds: `kvtier.json`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::format::FORMAT;
use super::space::{io_error, write_error};
use crate::checksum::Checksum;
use crate::tier::{TierError, namespace};

pub(super) const IDENTITY_FILE: &str = "kvtier.json";
const NEW_FILE: &str = "kvtier.json.new";

/// What is in `kvtier.json`, beside the format and the checksum.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Identity {
    pub(super) chunk_bytes: u64,
    pub(super) key_bytes: usize,
    /// Slots a full segment.
    pub(super) slots_per_segment: u32,
    /// As of the last opening.
    pub(super) capacity_bytes: u64,
    pub(super) namespace: String,
}

impl Identity {
    /// Reads that of the store in `directory`; `None` if there is no store.
    pub(super) fn read(directory: &Path) -> Result<Option<Self>, TierError> {
        let path = directory.join(IDENTITY_FILE);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(io_error("reading", &path, source)),
        };
        let unreadable = |why: String| TierError::Unreadable { path: path.clone(), why };
        let mut fields: Map<String, Value> =
            serde_json::from_slice(&text).map_err(|error| unreadable(error.to_string()))?;
        match fields.get("format").and_then(Value::as_u64) {
            Some(found) if found == u64::from(FORMAT) => {}
            Some(found) => {
                return Err(TierError::Format {
                    path: directory.to_owned(),
                    found,
                    expected: FORMAT,
                });
            }
            None => return Err(unreadable("it names no format".to_owned())),
        }
        let stored = fields.remove("checksum");
        if stored != Some(checksum(&fields)) {
            return Err(unreadable("its checksum is wrong".to_owned()));
        }
        fields.remove("format");
        serde_json::from_value(Value::Object(fields))
            .map(Some)
            .map_err(|error| unreadable(error.to_string()))
    }

    /// Replaces the file as a whole, and waits until it is on the disk.
    pub(super) fn write(&self, directory: &Path) -> Result<(), TierError> {
        let new = directory.join(NEW_FILE);
        let written = File::create(&new).and_then(|mut file| {
            file.write_all(self.text().as_bytes())?;
            file.sync_all()
        });
        written.map_err(|source| write_error("writing", &new, source))?;
        fs::rename(&new, directory.join(IDENTITY_FILE))
            .map_err(|source| write_error("renaming", &new, source))
    }

    /// The content of the file.
    pub(super) fn text(&self) -> String {
        let mut fields = match json!(self) {
            Value::Object(fields) => fields,
            _ => Map::new(),
        };
        fields.insert("format".to_owned(), FORMAT.into());
        fields.insert("checksum".to_owned(), checksum(&fields));
        Value::Object(fields).to_string()
    }

    /// Refuses to open a store that is `found` as this one.
    pub(super) fn check(&self, found: &Self, directory: &Path) -> Result<(), TierError> {
        let (found, expected) = (found.compared(), self.compared());
        if found == expected {
            return Ok(());
        }
        Err(TierError::Identity {
            path: directory.to_owned(),
            differences: differences(&found, &expected).join("; "),
            found: found.to_string(),
            expected: expected.to_string(),
        })
    }

    /// What must be equal, for people as well: the namespace as the JSON it is, if it is.
    fn compared(&self) -> Value {
        json!({
            "format": FORMAT,
            "chunk_bytes": self.chunk_bytes,
            "key_bytes": self.key_bytes,
            "namespace": self.namespace_value(),
        })
    }

    /// The namespace: the JSON it is, or a text.
    pub(super) fn namespace_value(&self) -> Value {
        namespace::value_of(&self.namespace)
    }

    /// What headers name the namespace by.
    pub(super) fn namespace_checksum(&self) -> Checksum {
        namespace::checksum_of(&self.namespace_value())
    }
}

fn checksum(fields: &Map<String, Value>) -> Value {
    format!("{:016x}", namespace::checksum_of(&Value::Object(fields.clone())).0).into()
}

/// What differs between two identities, field by field.
fn differences(found: &Value, expected: &Value) -> Vec<String> {
    let (mut theirs, mut ours) = (BTreeMap::new(), BTreeMap::new());
    flatten("", found, &mut theirs);
    flatten("", expected, &mut ours);
    let absent = || "nothing".to_owned();
    let fields: BTreeSet<_> = ours.keys().chain(theirs.keys()).collect();
    fields
        .into_iter()
        .filter(|&field| ours.get(field) != theirs.get(field))
        .map(|field| {
            let found = theirs.get(field).cloned().unwrap_or_else(absent);
            let expected = ours.get(field).cloned().unwrap_or_else(absent);
            format!("{field} is {found}, expected {expected}")
        })
        .collect()
}

/// Every leaf of a JSON value under its dotted path.
fn flatten(path: &str, value: &Value, leaves: &mut BTreeMap<String, String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let dot = if path.is_empty() { "" } else { "." };
                flatten(&format!("{path}{dot}{name}"), value, leaves);
            }
        }
        leaf => {
            leaves.insert(path.to_owned(), leaf.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(namespace: &str) -> Identity {
        Identity {
            chunk_bytes: 4096,
            key_bytes: 8,
            slots_per_segment: 100,
            capacity_bytes: 1 << 20,
            namespace: namespace.to_owned(),
        }
    }

    #[test]
    fn what_is_written_is_read_and_any_flipped_bit_is_found() {
        let directory = tempfile::tempdir().expect("temporary");
        assert_eq!(Identity::read(directory.path()).expect("absent"), None);
        let written = identity("{\"b\": [1, {\"d\": 1, \"c\": null}], \"a\": \"x\"}");
        written.write(directory.path()).expect("written");
        assert_eq!(Identity::read(directory.path()).expect("read"), Some(written));
        let path = directory.path().join(IDENTITY_FILE);
        let mut bytes = fs::read(&path).expect("there");
        for bit in 0..bytes.len() * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, &bytes).expect("damaged");
            let error = Identity::read(directory.path()).expect_err("damaged");
            let named = matches!(error, TierError::Unreadable { .. } | TierError::Format { .. });
            assert!(named, "bit {bit}: {error}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn namespaces_are_compared_field_by_field() {
        let (one, same) = (identity("{\"a\":1,\"b\":2}"), identity(" {\"b\":2, \"a\":1}"));
        one.check(&same, Path::new("/x")).expect("the same fields");
        assert_eq!(one.namespace_checksum(), same.namespace_checksum());
        let other = identity("{\"a\":1,\"b\":{\"c\":3}}");
        let error = one.check(&other, Path::new("/x")).expect_err("another");
        let text = error.to_string();
        let differences =
            "namespace.b is nothing, expected 2; namespace.b.c is 3, expected nothing";
        assert!(text.contains(differences), "{text}");
        assert!(text.contains("\"c\":3") && text.contains("\"b\":2"), "{text}");
        assert_ne!(one.namespace_checksum(), other.namespace_checksum());
        let mut wider = one.clone();
        wider.key_bytes = 9;
        assert!(one.check(&wider, Path::new("/x")).is_err());
        wider.key_bytes = 8;
        wider.capacity_bytes += 1;
        one.check(&wider, Path::new("/x")).expect("the capacity may change");
    }
}
