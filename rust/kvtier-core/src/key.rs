//! Keys name chunks by content: a block hash that is chained over the prefix, and a group index.
//!
//! All keys of one index have one length, [`MIN_KEY_BYTES`]`..=`[`MAX_KEY_BYTES`] bytes, fixed
//! when the index is made. A batch of keys is one flat buffer, so a call with a thousand keys
//! costs one allocation.

use std::fmt;

/// The shortest key, in bytes.
pub const MIN_KEY_BYTES: usize = 8;
/// The longest key, in bytes.
pub const MAX_KEY_BYTES: usize = 64;

/// A key of the wrong length, or a key length that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// A key whose length is not that of the index.
    #[error("key {index} ({key}) has {found} bytes, but this index has keys of {expected} bytes")]
    Length {
        /// Position in the batch.
        index: usize,
        /// The key, in hexadecimal.
        key: HexKey,
        /// Bytes that a key has here.
        expected: usize,
        /// Bytes that it had.
        found: usize,
    },
    /// A key length outside the bounds.
    #[error("keys of {0} bytes are not possible: use {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes")]
    Unsupported(usize),
    /// A flat buffer that is no whole number of keys.
    #[error("a buffer of {bytes} bytes is no whole number of keys of {key_bytes} bytes")]
    Ragged {
        /// Bytes in the buffer.
        bytes: usize,
        /// Bytes a key.
        key_bytes: usize,
    },
}

/// A key in an error message: shown in hexadecimal, whatever its length.
#[derive(Clone, PartialEq, Eq)]
pub struct HexKey(Box<[u8]>);

impl From<&[u8]> for HexKey {
    fn from(key: &[u8]) -> Self {
        Self(key.into())
    }
}

impl fmt::Display for HexKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for HexKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Checks that keys of `key_bytes` bytes are possible.
///
/// # Errors
/// [`KeyError::Unsupported`] outside [`MIN_KEY_BYTES`]`..=`[`MAX_KEY_BYTES`].
pub fn check_key_bytes(key_bytes: usize) -> Result<(), KeyError> {
    if (MIN_KEY_BYTES..=MAX_KEY_BYTES).contains(&key_bytes) {
        Ok(())
    } else {
        Err(KeyError::Unsupported(key_bytes))
    }
}

/// Keys of one call, one behind the other in one buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyBatch {
    bytes: Vec<u8>,
    key_bytes: usize,
}

impl KeyBatch {
    /// An empty batch for keys of `key_bytes` bytes; takes no memory yet.
    pub fn empty(key_bytes: usize) -> Self {
        Self::with_capacity(0, key_bytes)
    }

    /// An empty batch with room for `keys` keys of `key_bytes` bytes.
    pub fn with_capacity(keys: usize, key_bytes: usize) -> Self {
        debug_assert!(check_key_bytes(key_bytes).is_ok());
        Self { bytes: Vec::with_capacity(keys * key_bytes), key_bytes }
    }

    /// Takes a flat buffer of keys over.
    ///
    /// # Errors
    /// [`KeyError::Ragged`] when it is no whole number of keys.
    pub fn from_flat(bytes: Vec<u8>, key_bytes: usize) -> Result<Self, KeyError> {
        check_key_bytes(key_bytes)?;
        if !bytes.len().is_multiple_of(key_bytes) {
            return Err(KeyError::Ragged { bytes: bytes.len(), key_bytes });
        }
        Ok(Self { bytes, key_bytes })
    }

    /// Appends a key.
    ///
    /// # Errors
    /// [`KeyError::Length`] when it has not this batch's length.
    pub fn push(&mut self, key: &[u8]) -> Result<(), KeyError> {
        if key.len() != self.key_bytes {
            return Err(KeyError::Length {
                index: self.len(),
                key: key.into(),
                expected: self.key_bytes,
                found: key.len(),
            });
        }
        self.bytes.extend_from_slice(key);
        Ok(())
    }

    /// Bytes a key.
    pub fn key_bytes(&self) -> usize {
        self.key_bytes
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.key_bytes
    }

    /// Whether there is no key.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The key at `index`; panics past the end, as a slice does.
    pub fn get(&self, index: usize) -> &[u8] {
        let start = index * self.key_bytes;
        &self.bytes[start..start + self.key_bytes]
    }

    /// The keys in order.
    pub fn iter(&self) -> std::slice::ChunksExact<'_, u8> {
        self.bytes.chunks_exact(self.key_bytes)
    }

    /// Drops all keys.
    pub fn clear(&mut self) {
        self.bytes.clear();
    }

    /// Appends all keys of a batch of the same key length.
    pub fn append(&mut self, other: &Self) {
        debug_assert_eq!(self.key_bytes, other.key_bytes);
        self.bytes.extend_from_slice(&other.bytes);
    }
}

impl<'a> IntoIterator for &'a KeyBatch {
    type Item = &'a [u8];
    type IntoIter = std::slice::ChunksExact<'a, u8>;
    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_of_another_length_is_refused_by_name() {
        let mut batch = KeyBatch::with_capacity(2, 8);
        batch.push(b"01234567").expect("right length");
        let error = batch.push(b"0123").expect_err("too short");
        assert_eq!(
            error.to_string(),
            "key 1 (30313233) has 4 bytes, but this index has keys of 8 bytes"
        );
        assert_eq!(batch.len(), 1);
    }

    #[test]
    fn a_ragged_buffer_is_refused() {
        assert!(matches!(
            KeyBatch::from_flat(vec![0; 17], 8),
            Err(KeyError::Ragged { bytes: 17, .. })
        ));
        assert_eq!(KeyBatch::from_flat(vec![0; 16], 8).expect("whole").len(), 2);
    }
}
