//! What chunks are called on the servers: `prefix:1:namespace:{key}`, and behind that
//! `:writer:number` for each further part of a chunk that is split.
//!
//! The number is the format's version, so that versions do not remove each other's values. The
//! namespace is part of each name, so that namespaces never meet. The braces make all parts of a
//! chunk go to one slot of a cluster, and the chunks of a request to all of them.

use std::fmt::Write;

use crate::tier::network::NamespaceId;

const DIGITS: &[u8; 16] = b"0123456789abcdef";

/// See the module.
pub(super) struct Names {
    start: String,
}

impl Names {
    pub(super) fn new(prefix: &str, namespace: NamespaceId) -> Self {
        Self { start: format!("{prefix}:1:{namespace}:{{") }
    }

    /// The name of a chunk's value, or of its first part.
    pub(super) fn of(&self, key: &[u8]) -> String {
        let mut name = Vec::with_capacity(self.start.len() + 2 * key.len() + 1);
        name.extend_from_slice(self.start.as_bytes());
        for &byte in key {
            name.extend([byte >> 4, byte & 15].map(|digit| DIGITS[usize::from(digit)]));
        }
        name.push(b'}');
        // Nothing but ASCII.
        String::from_utf8(name).unwrap_or_default()
    }

    /// The name of a further part of the chunk `name`.
    pub(super) fn of_part(name: &str, writer: u64, part: u32) -> String {
        let mut part_name = name.to_owned();
        // Writing to a text does not fail.
        let _ = write!(part_name, ":{writer:016x}:{part}");
        part_name
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use redis::cluster_routing::Slot;

    #[test]
    fn parts_of_a_chunk_share_its_slot_and_namespaces_share_no_name() {
        let names = |space: &str| Names::new("kvtier", NamespaceId::new(space, 4096, 2));
        let (ours, theirs) = (names("a"), names("b"));
        let name = ours.of(&[0x0a, 0xff]);
        assert!(name.starts_with("kvtier:1:") && name.ends_with(":{0aff}"), "{name}");
        assert_ne!(name, theirs.of(&[0x0a, 0xff]));
        let part = Names::of_part(&name, 7, 12);
        assert_eq!(part, format!("{name}:0000000000000007:12"));
        assert_eq!(Slot::for_key(&part), Slot::for_key(&name));
    }
}
