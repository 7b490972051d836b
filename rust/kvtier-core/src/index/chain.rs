//! Which chunk comes before which in a prefix.
//!
//! Keys are chained over the prefix, but a key does not say what it follows: its place in a
//! request does. A [`Chain`] remembers, group by group, the last chunk of a request, so the next
//! one gets it as its parent, over calls and over requests of several groups.

use super::{Index, NIL, Token};

/// Bytes at the end of a key that name its group.
const GROUP_BYTES: usize = 4;

/// Groups that a chain follows at most; models have a handful.
const MAX_GROUPS: usize = 16;

/// The last chunk of each group of one request.
#[derive(Debug, Clone, Default)]
pub struct Chain(Vec<Link>);

#[derive(Debug, Clone)]
struct Link {
    group: [u8; GROUP_BYTES],
    token: Token,
    /// Says whether the token still means the same key.
    fingerprint: Option<u64>,
}

impl Chain {
    /// The entry that `key` follows, if it is still resident.
    pub(super) fn parent(&self, index: &Index, key: &[u8]) -> Token {
        let link = self.0.iter().find(|link| link.group == group(key));
        link.map_or(NIL, |link| match link.fingerprint {
            Some(fingerprint) if index.fingerprint_if_used(link.token) != Some(fingerprint) => NIL,
            _ => link.token,
        })
    }

    /// Notes that `key`, in entry `token`, is the last one of its group now.
    pub fn follow(&mut self, key: &[u8], token: Token) {
        let group = group(key);
        if let Some(link) = self.0.iter_mut().find(|link| link.group == group) {
            link.token = token;
            link.fingerprint = None;
        } else if self.0.len() < MAX_GROUPS {
            self.0.push(Link { group, token, fingerprint: None });
        }
        // Else these keys end in no group index, and what they follow is not known.
    }

    /// Makes the chain safe to keep while entries come and go: to be called before the index
    /// changes in any other way than by calls that get this chain. Chunks that are not resident
    /// are forgotten.
    pub fn keep(&mut self, index: &Index) {
        for link in &mut self.0 {
            link.fingerprint = index.fingerprint_if_used(link.token);
        }
        self.0.retain(|link| link.fingerprint.is_some());
    }
}

fn group(key: &[u8]) -> [u8; GROUP_BYTES] {
    let start = key.len().saturating_sub(GROUP_BYTES);
    let mut group = [0; GROUP_BYTES];
    group[..key.len() - start].copy_from_slice(&key[start..]);
    group
}
