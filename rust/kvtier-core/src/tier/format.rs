//! The bytes of the file tier's files. All numbers are little-endian.
//!
//! ```text
//! DIR/kvtier.json             identity: format, namespace, chunk_bytes, key_bytes
//! DIR/LOCK                    held with flock by the owner, whose pid it contains
//! DIR/tmp/SLOT.kv             a chunk being written
//! DIR/chunks/XX/SLOT.kv       a chunk; XX is the slot modulo 256, in hexadecimal
//! ```
//!
//! A chunk file is a header of [`HEADER_BYTES`] and the payload, `chunk_bytes` long. It is named
//! by slot, not by key: a new chunk replaces the one that was evicted for it by one `rename`, so
//! nothing is unlinked on the way and the number of files is bounded by the number of slots.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::checksum::Checksum;
use crate::key::MAX_KEY_BYTES;

/// Version of the format; another one is refused.
pub(super) const FORMAT: u32 = 1;
/// Bytes in front of the payload: one page, so that the payload stays aligned.
pub(super) const HEADER_BYTES: usize = 4096;
const MAGIC: [u8; 8] = *b"KVTCHUNK";

/// The start of a chunk file; zeros fill the page.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy)]
#[repr(C)]
pub(super) struct Header {
    magic: [u8; 8],
    format: U32,
    key_bytes: U32,
    payload_bytes: U64,
    payload_checksum: U64,
    namespace_checksum: U64,
    key: [u8; MAX_KEY_BYTES],
    /// Over all fields above.
    checksum: U64,
}

impl Header {
    /// The header of a chunk.
    pub(super) fn new(
        key: &[u8],
        payload_bytes: usize,
        payload: Checksum,
        namespace: Checksum,
    ) -> Self {
        let mut padded = [0; MAX_KEY_BYTES];
        padded[..key.len()].copy_from_slice(key);
        let mut header = Self {
            magic: MAGIC,
            format: FORMAT.into(),
            key_bytes: (key.len() as u32).into(),
            payload_bytes: (payload_bytes as u64).into(),
            payload_checksum: payload.0.into(),
            namespace_checksum: namespace.0.into(),
            key: padded,
            checksum: 0.into(),
        };
        header.checksum = header.computed_checksum().0.into();
        header
    }

    fn computed_checksum(&self) -> Checksum {
        let bytes = self.as_bytes();
        Checksum::of(&bytes[..bytes.len() - size_of::<U64>()])
    }

    /// The header at the start of `bytes`, if it is whole and of this format and namespace.
    pub(super) fn parse(bytes: &[u8], namespace: Checksum) -> Option<Self> {
        let (header, _) = Self::read_from_prefix(bytes).ok()?;
        let whole = header.magic == MAGIC
            && header.format == FORMAT
            && header.checksum == header.computed_checksum().0
            && header.namespace_checksum == namespace.0
            && header.key_bytes.get() as usize <= MAX_KEY_BYTES;
        whole.then_some(header)
    }

    /// Whose chunk it is.
    pub(super) fn key(&self) -> &[u8] {
        &self.key[..self.key_bytes.get() as usize]
    }

    /// Bytes of the payload.
    pub(super) fn payload_bytes(&self) -> u64 {
        self.payload_bytes.get()
    }

    /// What the payload's checksum should be.
    pub(super) fn payload_checksum(&self) -> Checksum {
        Checksum(self.payload_checksum.get())
    }

    /// The whole header page.
    pub(super) fn page(&self) -> [u8; HEADER_BYTES] {
        let mut page = [0; HEADER_BYTES];
        let bytes = self.as_bytes();
        page[..bytes.len()].copy_from_slice(bytes);
        page
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_survives_and_any_flipped_bit_is_found() {
        let namespace = Checksum(7);
        let header = Header::new(b"0123456789", 4096, Checksum(42), namespace);
        let mut page = header.page();
        let read = Header::parse(&page, namespace).expect("whole");
        assert_eq!(read.key(), b"0123456789");
        assert_eq!(read.payload_bytes(), 4096);
        assert_eq!(read.payload_checksum(), Checksum(42));
        assert!(Header::parse(&page, Checksum(8)).is_none(), "another namespace");
        for bit in 0..size_of::<Header>() * 8 {
            page[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::parse(&page, namespace).is_none(), "bit {bit}");
            page[bit / 8] ^= 1 << (bit % 8);
        }
    }
}
