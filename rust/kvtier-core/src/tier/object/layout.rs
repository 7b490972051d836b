//! What an object is called, and whose it is.
//!
//! ```text
//! PREFIX / namespace id / shard / key in hexadecimal digits
//! ```
//!
//! The shard is the key's first digit: sixteen listings side by side. An object is an
//! [`Envelope`](crate::tier::network::Envelope) and the payload behind it.

use object_store::path::{Path, PathPart};

use crate::key::HexKey;
use crate::tier::network::{ENVELOPE_BYTES, NamespaceId};

/// The digits that shards are called.
pub(super) const SHARDS: &str = "0123456789abcdef";

/// Where the objects of one namespace are.
#[derive(Debug)]
pub(super) struct Layout {
    directory: Path,
    pub(super) namespace: NamespaceId,
    pub(super) chunk_bytes: usize,
    key_bytes: usize,
}

impl Layout {
    pub(super) fn new(
        prefix: &Path,
        namespace: &str,
        chunk_bytes: usize,
        key_bytes: usize,
    ) -> Self {
        let namespace = NamespaceId::new(namespace, chunk_bytes, key_bytes);
        let directory = prefix.clone().join(PathPart::from(namespace.to_string()));
        Self { directory, namespace, chunk_bytes, key_bytes }
    }

    /// Bytes of an object.
    pub(super) fn object_bytes(&self) -> u64 {
        (ENVELOPE_BYTES + self.chunk_bytes) as u64
    }

    /// The object of a key.
    pub(super) fn path(&self, key: &[u8]) -> Path {
        let digits = HexKey::from(key).to_string();
        let shard = digits.chars().next().unwrap_or_default();
        self.shard(shard).join(PathPart::from(digits))
    }

    /// What the objects of a shard have in front.
    pub(super) fn shard(&self, digit: char) -> Path {
        self.directory.clone().join(PathPart::from(digit.to_string()))
    }

    /// The key of an object that a listing names.
    pub(super) fn key(&self, path: &Path) -> Option<Vec<u8>> {
        let digits = path.filename().filter(|name| name.len() == 2 * self.key_bytes)?;
        (0..self.key_bytes)
            .map(|at| u8::from_str_radix(digits.get(2 * at..2 * at + 2)?, 16).ok())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_found_again_in_its_path_and_nothing_else_is_one() {
        let layout = Layout::new(&Path::from("a/b"), "model", 4096, 8);
        let path = layout.path(b"\xfe2345678");
        assert_eq!(path.as_ref(), format!("a/b/{}/f/fe32333435363738", layout.namespace));
        assert!(path.prefix_matches(&layout.shard('f')));
        assert_eq!(layout.key(&path).as_deref(), Some(&b"\xfe2345678"[..]));
        for other in ["a/b", "a/fe323334353637", "a/fe3233343536373z", "a/fe323334353637\u{e4}"] {
            assert_eq!(layout.key(&Path::from(other)), None, "{other}");
        }
    }
}
