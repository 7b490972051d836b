//! The header in front of each value on a server: whose chunk it is, and whether it is whole.
//!
//! A server is shared: with other models, other versions of kvtier, and whoever can reach it. The
//! key of a value names the namespace and the chunk, and the value says it again, with the
//! checksum that the chunk got when it left the primary tier. A value is served only if all of it
//! is right; anything else is a [`BadCopy`] with a cause, and is removed.
//!
//! Little-endian, [`ENVELOPE_BYTES`] bytes:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic, `KVTN` |
//! | 4 | 2 | format version, 1 |
//! | 6 | 2 | length of the key |
//! | 8 | 4 | parts that the payload lies in; 1: it follows this header |
//! | 12 | 4 | zero |
//! | 16 | 8 | writer: a number that the parts of one store share, 0 for one part |
//! | 24 | 8 | namespace id |
//! | 32 | 8 | bytes of the payload, all parts together |
//! | 40 | 8 | checksum of key and payload |
//! | 48 | 64 | key, zeros behind it |
//! | 112 | 8 | zero |
//! | 120 | 8 | checksum of all fields above |

use serde_json::json;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::checksum::Checksum;
use crate::key::MAX_KEY_BYTES;
use crate::tier::namespace;

/// Version of the format.
const FORMAT: u16 = 1;
const MAGIC: [u8; 4] = *b"KVTN";

/// Bytes of an envelope.
pub const ENVELOPE_BYTES: usize = size_of::<Raw>();

const _: () = assert!(ENVELOPE_BYTES == 128);

/// Whose chunks: a checksum of the manager's namespace in its canonical form, the length of a
/// chunk and that of a key. It is part of every key on a server, so namespaces never meet there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NamespaceId(Checksum);

impl NamespaceId {
    /// That of a manager.
    pub fn new(namespace: &str, chunk_bytes: usize, key_bytes: usize) -> Self {
        Self(namespace::checksum_of(&json!({
            "chunk_bytes": chunk_bytes,
            "key_bytes": key_bytes,
            "namespace": namespace::value_of(namespace),
        })))
    }
}

impl std::fmt::Display for NamespaceId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", self.0.0)
    }
}

/// Why a value on a server is not the chunk that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadCopy {
    /// It is longer or shorter than it should be.
    #[error("has {found} bytes instead of {expected}")]
    Length {
        /// Bytes that it has.
        found: u64,
        /// Bytes that it should have.
        expected: u64,
    },
    /// It does not begin with an envelope, or that is damaged.
    #[error("has no whole header")]
    Header,
    /// A version of kvtier wrote it whose format this one does not know.
    #[error("has format version {0}, this version of kvtier has {FORMAT}")]
    Version(u16),
    /// It is another namespace's.
    #[error("belongs to another namespace")]
    Namespace,
    /// It is another chunk.
    #[error("is another chunk")]
    Key,
    /// Its bytes are not those that were stored.
    #[error("has other bytes than were stored")]
    Checksum,
}

impl BadCopy {
    /// Which part of the copy is bad, as findings of a check name it.
    pub fn part(self) -> &'static str {
        match self {
            Self::Length { .. } => "length",
            Self::Header => "header",
            Self::Version(_) => "version",
            Self::Namespace => "namespace",
            Self::Key => "name",
            Self::Checksum => "payload",
        }
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy)]
#[repr(C)]
struct Raw {
    magic: [u8; 4],
    format: U16,
    key_bytes: U16,
    parts: U32,
    zero: U32,
    writer: U64,
    namespace: U64,
    payload_bytes: U64,
    payload_checksum: U64,
    key: [u8; MAX_KEY_BYTES],
    reserved: U64,
    checksum: U64,
}

impl Raw {
    fn computed_checksum(&self) -> Checksum {
        Checksum::of(&self.as_bytes()[..ENVELOPE_BYTES - size_of::<U64>()])
    }
}

/// What an envelope says, beside what every envelope of a tier says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Envelope {
    /// Checksum of key and payload.
    pub checksum: Checksum,
    /// Values that the payload lies in.
    pub parts: u32,
    /// What the parts of one store share.
    pub writer: u64,
}

impl Envelope {
    /// Its bytes, for a chunk of `payload_bytes`.
    pub fn encode(
        &self,
        namespace: NamespaceId,
        key: &[u8],
        payload_bytes: usize,
    ) -> [u8; ENVELOPE_BYTES] {
        let mut padded = [0; MAX_KEY_BYTES];
        padded[..key.len()].copy_from_slice(key);
        let mut raw = Raw {
            magic: MAGIC,
            format: FORMAT.into(),
            key_bytes: (key.len() as u16).into(),
            parts: self.parts.into(),
            zero: 0.into(),
            writer: self.writer.into(),
            namespace: namespace.0.0.into(),
            payload_bytes: (payload_bytes as u64).into(),
            payload_checksum: self.checksum.0.into(),
            key: padded,
            reserved: 0.into(),
            checksum: 0.into(),
        };
        raw.checksum = raw.computed_checksum().0.into();
        zerocopy::transmute!(raw)
    }

    /// What `bytes` say, if they are the envelope of this chunk.
    ///
    /// # Errors
    /// [`BadCopy`] with the first thing that is wrong.
    pub fn decode(
        bytes: &[u8; ENVELOPE_BYTES],
        namespace: NamespaceId,
        key: &[u8],
        payload_bytes: usize,
    ) -> Result<Self, BadCopy> {
        let raw: Raw = zerocopy::transmute!(*bytes);
        if raw.magic != MAGIC || raw.checksum != raw.computed_checksum().0 {
            return Err(BadCopy::Header);
        }
        if raw.format != FORMAT {
            return Err(BadCopy::Version(raw.format.get()));
        }
        if raw.namespace != namespace.0.0 {
            return Err(BadCopy::Namespace);
        }
        if raw.key.get(..usize::from(raw.key_bytes.get())) != Some(key) {
            return Err(BadCopy::Key);
        }
        if raw.payload_bytes != payload_bytes as u64 || raw.parts == 0 {
            let found = raw.payload_bytes.get();
            return Err(BadCopy::Length { found, expected: payload_bytes as u64 });
        }
        Ok(Self {
            checksum: Checksum(raw.payload_checksum.get()),
            parts: raw.parts.get(),
            writer: raw.writer.get(),
        })
    }

    /// What the envelope of any chunk says, for checking a server.
    ///
    /// # Errors
    /// [`BadCopy`], if it is not whole or of another format.
    pub fn inspect(bytes: &[u8; ENVELOPE_BYTES]) -> Result<Inspected, BadCopy> {
        let raw: Raw = zerocopy::transmute!(*bytes);
        let namespace = NamespaceId(Checksum(raw.namespace.get()));
        let payload_bytes = raw.payload_bytes.get();
        let key = raw.key.get(..usize::from(raw.key_bytes.get())).ok_or(BadCopy::Header)?.to_vec();
        let envelope = Self::decode(bytes, namespace, &key, payload_bytes as usize)?;
        Ok(Inspected { namespace, key, payload_bytes, envelope })
    }
}

/// All that an envelope says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inspected {
    /// Whose it is.
    pub namespace: NamespaceId,
    /// The chunk's key.
    pub key: Vec<u8>,
    /// Bytes of the chunk.
    pub payload_bytes: u64,
    /// The rest.
    pub envelope: Envelope,
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &[u8] = b"0123456789";

    fn id(namespace: &str) -> NamespaceId {
        NamespaceId::new(namespace, 4096, KEY.len())
    }

    #[test]
    fn an_envelope_survives_and_any_flipped_bit_is_found() {
        let envelope = Envelope { checksum: Checksum(42), parts: 3, writer: 1 << 40 };
        let mut bytes = envelope.encode(id("a"), KEY, 4096);
        assert_eq!(Envelope::decode(&bytes, id("a"), KEY, 4096), Ok(envelope));
        let inspected = Envelope::inspect(&bytes).expect("whole");
        let (namespace, key) = (id("a"), KEY.to_vec());
        assert_eq!(inspected, Inspected { namespace, key, payload_bytes: 4096, envelope });
        for bit in 0..ENVELOPE_BYTES * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            let error = Envelope::decode(&bytes, id("a"), KEY, 4096).expect_err("damaged");
            assert_eq!(error, BadCopy::Header, "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn what_is_not_this_chunk_is_refused_with_the_cause() {
        let envelope = Envelope { checksum: Checksum(42), parts: 1, writer: 0 };
        let bytes = envelope.encode(id("a"), KEY, 4096);
        let decode = |namespace, key, bytes_of| Envelope::decode(&bytes, namespace, key, bytes_of);
        assert_eq!(decode(id("b"), KEY, 4096), Err(BadCopy::Namespace));
        assert_eq!(decode(id("a"), b"0123456780", 4096), Err(BadCopy::Key));
        assert_eq!(decode(id("a"), b"012345678", 4096), Err(BadCopy::Key), "a prefix of it");
        let shorter = BadCopy::Length { found: 4096, expected: 8192 };
        assert_eq!(decode(id("a"), KEY, 8192), Err(shorter));
        let mut newer: Raw = zerocopy::transmute!(bytes);
        newer.format = 2.into();
        newer.checksum = newer.computed_checksum().0.into();
        let newer: [u8; ENVELOPE_BYTES] = zerocopy::transmute!(newer);
        assert_eq!(Envelope::decode(&newer, id("a"), KEY, 4096), Err(BadCopy::Version(2)));
    }

    #[test]
    fn the_namespace_id_is_of_everything_that_shapes_a_chunk() {
        let same = NamespaceId::new(r#"{"b": 1, "a": 2}"#, 4096, 10);
        assert_eq!(NamespaceId::new(r#"{"a":2,"b":1}"#, 4096, 10), same);
        for other in [
            NamespaceId::new(r#"{"a":2,"b":2}"#, 4096, 10),
            NamespaceId::new(r#"{"a":2,"b":1}"#, 8192, 10),
            NamespaceId::new(r#"{"a":2,"b":1}"#, 4096, 11),
        ] {
            assert_ne!(other, same);
        }
        assert_eq!(same.to_string().len(), 16);
    }
}
