//! The checksum that a chunk carries from the moment it leaves the primary tier.
//!
//! CRC-64/NVME: a cyclic code finds every error burst of up to 64 bits, which a hash only does
//! with high probability, and with carry-less multiplication it runs faster than memory
//! (`cargo bench --bench checksum`). It is fixed by standard, so it can be stored.

use crc_fast::{CrcAlgorithm::Crc64Nvme, Digest};

/// Checksum of a chunk, or of something that is stored beside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checksum(pub u64);

impl Checksum {
    /// The checksum of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        let mut digest = Digest::new(Crc64Nvme);
        digest.update(bytes);
        Self(digest.finalize())
    }

    /// The checksum of a chunk: of its key, then its bytes. So the bytes of another chunk, whole
    /// as they may be, are not taken for this one's.
    pub fn of_chunk(key: &[u8], bytes: &[u8]) -> Self {
        let mut digest = Digest::new(Crc64Nvme);
        digest.update(key);
        digest.update(bytes);
        Self(digest.finalize())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_the_standard_crc64_nvme() {
        // The check value of the algorithm's catalogue entry.
        assert_eq!(Checksum::of(b"123456789"), Checksum(0xAE8B_1486_0A79_9888));
    }

    #[test]
    fn every_single_bit_flip_changes_it() {
        let mut bytes: Vec<u8> = (0..=255).collect();
        let whole = Checksum::of(&bytes);
        for bit in 0..bytes.len() * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(Checksum::of(&bytes), whole, "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn a_chunk_is_its_key_and_its_bytes() {
        assert_eq!(Checksum::of_chunk(b"1234", b"56789"), Checksum::of(b"123456789"));
        assert_ne!(Checksum::of_chunk(b"one", b"same"), Checksum::of_chunk(b"two", b"same"));
    }

    #[test]
    fn zeros_have_a_checksum_that_is_not_zero() {
        assert_ne!(Checksum::of(&[0; 4096]), Checksum(0));
    }
}
