//! The bytes of a store's headers and facts. `docs/file-format.md` states them, and why.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::checksum::Checksum;
use crate::index::Slot;
use crate::key::MAX_KEY_BYTES;

/// Version of the format; another one is refused.
pub(super) const FORMAT: u32 = 2;
/// Files are made of pages.
pub(super) const PAGE: usize = 4096;
/// Bytes a header; divides a sector, so that a header is written whole or not at all.
pub(super) const HEADER_BYTES: usize = size_of::<Header>();
/// Facts a page holds.
pub(super) const FACTS_PER_PAGE: usize = (PAGE - size_of::<FactHead>()) / size_of::<Fact>();

const HEADER_MAGIC: [u8; 4] = *b"KVTH";
const FACTS_MAGIC: [u8; 8] = *b"KVTFACTS";

const _: () = assert!(HEADER_BYTES == 128 && FACTS_PER_PAGE == 169);

/// Which chunk a slot holds.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct Header {
    magic: [u8; 4],
    format: U16,
    key_bytes: U16,
    slot: U32,
    zero: U32,
    sequence: U64,
    namespace: U64,
    payload_bytes: U64,
    payload_checksum: U64,
    written_at: U64,
    key: [u8; MAX_KEY_BYTES],
    /// Over all fields above.
    checksum: U64,
}

/// What a header tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Told<'k> {
    pub(super) key: &'k [u8],
    pub(super) slot: Slot,
    pub(super) sequence: u64,
    pub(super) namespace: Checksum,
    pub(super) payload_bytes: u64,
    pub(super) payload: Checksum,
    /// Seconds since 1970, for people.
    pub(super) written_at: u64,
}

impl Header {
    pub(super) fn new(told: &Told<'_>) -> Self {
        let mut key = [0; MAX_KEY_BYTES];
        key[..told.key.len()].copy_from_slice(told.key);
        let mut header = Self {
            magic: HEADER_MAGIC,
            format: (FORMAT as u16).into(),
            key_bytes: (told.key.len() as u16).into(),
            slot: told.slot.into(),
            zero: 0.into(),
            sequence: told.sequence.into(),
            namespace: told.namespace.0.into(),
            payload_bytes: told.payload_bytes.into(),
            payload_checksum: told.payload.0.into(),
            written_at: told.written_at.into(),
            key,
            checksum: 0.into(),
        };
        header.checksum = header.computed_checksum().0.into();
        header
    }

    fn computed_checksum(&self) -> Checksum {
        Checksum::of(&self.as_bytes()[..HEADER_BYTES - size_of::<U64>()])
    }

    /// Whether it says that the slot is free.
    pub(super) fn is_free(&self) -> bool {
        self.as_bytes().iter().all(|&byte| byte == 0)
    }

    /// What it tells, if it is whole and of this format.
    pub(super) fn told(&self) -> Option<Told<'_>> {
        let key_bytes = usize::from(self.key_bytes.get());
        let whole = self.magic == HEADER_MAGIC
            && u32::from(self.format.get()) == FORMAT
            && key_bytes <= MAX_KEY_BYTES
            && self.checksum == self.computed_checksum().0;
        whole.then(|| Told {
            key: &self.key[..key_bytes],
            slot: self.slot.get(),
            sequence: self.sequence.get(),
            namespace: Checksum(self.namespace.get()),
            payload_bytes: self.payload_bytes.get(),
            payload: Checksum(self.payload_checksum.get()),
            written_at: self.written_at.get(),
        })
    }
}

/// How the chunk in a slot was used.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Fact {
    pub(super) slot: U32,
    pub(super) hits: U32,
    /// The chunk that is meant: that of the header with this number.
    pub(super) sequence: U64,
    pub(super) used: U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy)]
#[repr(C)]
struct FactHead {
    magic: [u8; 8],
    namespace: U64,
    count: U32,
    zero: U32,
    /// Over the page, with this field zero.
    checksum: U64,
}

/// A page of facts, [`FACTS_PER_PAGE`] at most.
pub(super) fn fact_page(facts: &[Fact], namespace: Checksum) -> [u8; PAGE] {
    debug_assert!(facts.len() <= FACTS_PER_PAGE);
    let mut page = [0; PAGE];
    let mut head = FactHead {
        magic: FACTS_MAGIC,
        namespace: namespace.0.into(),
        count: (facts.len() as u32).into(),
        zero: 0.into(),
        checksum: 0.into(),
    };
    let (head_bytes, rest) = page.split_at_mut(size_of::<FactHead>());
    head_bytes.copy_from_slice(head.as_bytes());
    rest[..size_of_val(facts)].copy_from_slice(facts.as_bytes());
    head.checksum = Checksum::of(&page).0.into();
    page[..size_of::<FactHead>()].copy_from_slice(head.as_bytes());
    page
}

/// What a page of facts is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum FactPage {
    /// Never written.
    Blank,
    /// Torn, damaged, or another store's.
    Bad,
    /// Whole.
    Facts(Vec<Fact>),
}

/// Reads a page of facts of this namespace.
pub(super) fn read_fact_page(page: &[u8; PAGE], namespace: Checksum) -> FactPage {
    if page.iter().all(|&byte| byte == 0) {
        return FactPage::Blank;
    }
    let Ok((mut head, rest)) = FactHead::read_from_prefix(page) else {
        return FactPage::Bad;
    };
    let stored = std::mem::replace(&mut head.checksum, 0.into());
    let mut bare = *page;
    bare[..size_of::<FactHead>()].copy_from_slice(head.as_bytes());
    let count = head.count.get() as usize;
    let whole = head.magic == FACTS_MAGIC
        && head.namespace == namespace.0
        && count <= FACTS_PER_PAGE
        && stored == Checksum::of(&bare).0;
    if !whole {
        return FactPage::Bad;
    }
    let facts = rest.chunks_exact(size_of::<Fact>()).take(count);
    FactPage::Facts(facts.filter_map(|bytes| Fact::read_from_bytes(bytes).ok()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_survives_and_any_flipped_bit_is_found() {
        let told = Told {
            key: b"0123456789",
            slot: 7,
            sequence: 1 << 40,
            namespace: Checksum(3),
            payload_bytes: 4096,
            payload: Checksum(42),
            written_at: 1_700_000_000,
        };
        let mut bytes = Header::new(&told).as_bytes().to_vec();
        let read = |bytes: &[u8]| Header::read_from_bytes(bytes).expect("its length");
        assert_eq!(read(&bytes).told(), Some(told));
        for bit in 0..HEADER_BYTES * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(read(&bytes).told(), None, "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        let free = read(&[0; HEADER_BYTES]);
        assert!(free.is_free() && free.told().is_none());
    }

    #[test]
    fn a_page_of_facts_survives_and_any_flipped_bit_is_found() {
        let fact = |slot: u32| Fact {
            slot: slot.into(),
            hits: 2.into(),
            sequence: 5.into(),
            used: (u64::MAX - u64::from(slot)).into(),
        };
        let facts: Vec<Fact> = (0..FACTS_PER_PAGE as u32).map(fact).collect();
        let namespace = Checksum(9);
        let mut page = fact_page(&facts, namespace);
        assert_eq!(read_fact_page(&page, Checksum(8)), FactPage::Bad, "another namespace");
        for bit in (0..PAGE * 8).step_by(7) {
            page[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(read_fact_page(&page, namespace), FactPage::Bad, "bit {bit}");
            page[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(read_fact_page(&page, namespace), FactPage::Facts(facts));
        assert_eq!(read_fact_page(&[0; PAGE], namespace), FactPage::Blank);
    }
}
