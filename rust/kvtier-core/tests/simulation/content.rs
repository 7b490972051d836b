//! Keys, and the bytes that belong to each: whatever is served can be checked against its key.

use std::fmt;

use kvtier_core::key::KeyBatch;

pub(crate) const CHUNK_BYTES: usize = 4096;
pub(crate) const KEY_BYTES: usize = 8;

/// The chunk `chunk` of one group of a sequence of tokens; shown as `sequence.chunk/group`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) sequence: u8,
    pub(crate) chunk: u8,
    pub(crate) group: u8,
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}/{}", self.sequence, self.chunk, self.group)
    }
}

impl Key {
    pub(crate) fn bytes(self) -> [u8; KEY_BYTES] {
        [self.sequence, self.chunk, 0, 0, 0, 0, 0, self.group]
    }

    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self { sequence: bytes[0], chunk: bytes[1], group: bytes[KEY_BYTES - 1] }
    }

    /// The words of the chunk: another start for each key, so no two chunks share a word.
    fn words(self) -> impl Iterator<Item = u64> {
        let first = (u64::from_le_bytes(self.bytes()) + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (0..).map(move |word: u64| first.wrapping_add(word))
    }

    /// Writes the chunk.
    pub(crate) fn write_to(self, bytes: &mut [u8]) {
        for (place, word) in bytes.chunks_exact_mut(8).zip(self.words()) {
            place.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// Whether these bytes are the chunk.
    pub(crate) fn is_in(self, bytes: &[u8]) -> bool {
        bytes.chunks_exact(8).zip(self.words()).all(|(place, word)| place == word.to_le_bytes())
    }
}

pub(crate) fn batch(keys: &[Key]) -> KeyBatch {
    let flat = keys.iter().flat_map(|key| key.bytes()).collect();
    KeyBatch::from_flat(flat, KEY_BYTES).expect("whole keys")
}
