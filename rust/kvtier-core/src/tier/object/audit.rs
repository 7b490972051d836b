//! Checking objects against what was stored, for `kvtier verify`.
//!
//! Works on every namespace under a prefix: an object says itself whose it is. A bucket is large,
//! so a sample is checked, drawn evenly over all objects. Memory: the names of the sample.

use futures_util::StreamExt;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStoreExt};
use tokio::runtime::{Builder, Runtime};

use super::cause::{Cause, is_missing};
use super::settings::{ObjectSettings, Opened};
use crate::checksum::Checksum;
use crate::tier::network::{BadCopy, ENVELOPE_BYTES, Envelope, Inspected, NetworkError};
use crate::tier::{Finding, TierError};

/// A check under way: objects are listed when it is opened, and read by [`ObjectAudit::check`].
pub struct ObjectAudit {
    opened: Opened,
    runtime: Runtime,
    repair: bool,
    objects: u64,
    sample: Vec<ObjectMeta>,
}

impl ObjectAudit {
    /// Lists the objects under the settings' URL and draws `sample` of them with `seed`.
    ///
    /// # Errors
    /// [`TierError`] when the bucket can not be listed.
    pub fn open(
        settings: &ObjectSettings,
        sample: usize,
        seed: u64,
        repair: bool,
    ) -> Result<Self, TierError> {
        let opened = settings.open()?;
        let runtime = Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|source| NetworkError::Threads { tier: opened.name.clone(), source })?;
        let mut random = fastrand::Rng::with_seed(seed);
        let (mut objects, mut drawn) = (0_u64, Vec::new());
        runtime.block_on(async {
            let mut listed = opened.store.list(Some(&opened.prefix));
            while let Some(object) = listed.next().await {
                let object =
                    object.map_err(|error| Cause::of(&error, &opened.name, "LIST").error)?;
                if named(&object.location).is_none() {
                    continue;
                }
                objects += 1;
                if drawn.len() < sample {
                    drawn.push(object);
                } else if let Some(other) = drawn.get_mut(random.u64(..objects) as usize) {
                    *other = object;
                }
            }
            Ok::<_, TierError>(())
        })?;
        // Drawn from the end.
        drawn.reverse();
        Ok(Self { opened, runtime, repair, objects, sample: drawn })
    }

    /// Chunks that the bucket holds.
    pub fn objects(&self) -> u64 {
        self.objects
    }

    /// Chunks that are still to be checked.
    pub fn left(&self) -> usize {
        self.sample.len()
    }

    /// Checks up to `count` chunks.
    ///
    /// # Errors
    /// [`TierError`] when an object can not be read.
    pub fn check(&mut self, count: usize) -> Result<Vec<Finding>, TierError> {
        let mut found = Vec::new();
        for object in self.sample.split_off(self.sample.len().saturating_sub(count)) {
            let work = check(&self.opened, &object.location, self.repair);
            found.extend(self.runtime.block_on(work)?);
        }
        Ok(found)
    }
}

/// Reads one object. One that is gone by now is not bad.
async fn check(opened: &Opened, path: &Path, repair: bool) -> Result<Option<Finding>, TierError> {
    let failed = |what| move |error| Cause::of(&error, &opened.name, what).error;
    let bytes = match opened.store.get(path).await {
        Err(error) if is_missing(&error) => return Ok(None),
        Err(error) => return Err(failed("GET")(error)),
        Ok(result) => result.bytes().await.map_err(failed("GET"))?,
    };
    let Err(bad) = judge(path, &bytes) else {
        return Ok(None);
    };
    if repair {
        opened.store.delete(path).await.map_err(failed("DELETE"))?;
    }
    Ok(Some(Finding {
        key: named(path).map(|(_, key)| key.into()),
        place: path.to_string(),
        what: bad.part(),
        repaired: repair,
    }))
}

/// Holds an object against what it says of itself, and against its name.
fn judge(path: &Path, bytes: &[u8]) -> Result<(), BadCopy> {
    let Some((header, payload)) = bytes.split_first_chunk::<ENVELOPE_BYTES>() else {
        return Err(BadCopy::Header);
    };
    let Inspected { namespace, key, payload_bytes, envelope } = Envelope::inspect(header)?;
    let (directory, name) = named(path).unwrap_or_default();
    if directory != namespace.to_string() {
        return Err(BadCopy::Namespace);
    }
    if name != key {
        return Err(BadCopy::Key);
    }
    if payload.len() as u64 != payload_bytes {
        let found = payload.len() as u64;
        return Err(BadCopy::Length { found, expected: payload_bytes });
    }
    if Checksum::of_chunk(&key, payload) != envelope.checksum {
        return Err(BadCopy::Checksum);
    }
    Ok(())
}

/// The namespace and the key that an object of ours is named by.
fn named(path: &Path) -> Option<(String, Vec<u8>)> {
    let parts: Vec<_> = path.parts().collect();
    let [.., namespace, shard, key] = parts.as_slice() else {
        return None;
    };
    let (namespace, key) = (namespace.as_ref(), key.as_ref());
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if namespace.len() != 16
        || !digits(namespace)
        || !digits(key)
        || !key.starts_with(shard.as_ref())
    {
        return None;
    }
    let bytes = (0..key.len() / 2).map(|at| u8::from_str_radix(&key[2 * at..2 * at + 2], 16).ok());
    Some((namespace.to_owned(), bytes.collect::<Option<_>>()?))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::tier::network::NamespaceId;

    const CHUNK: usize = 4096;

    fn object(namespace: NamespaceId, key: &[u8]) -> Vec<u8> {
        let payload = vec![key[0]; CHUNK];
        let checksum = Checksum::of_chunk(key, &payload);
        let mut bytes =
            Envelope { checksum, parts: 1, writer: 0 }.encode(namespace, key, CHUNK).to_vec();
        bytes.extend(payload);
        bytes
    }

    fn audit(directory: &std::path::Path, sample: usize, repair: bool) -> ObjectAudit {
        let url = url::Url::from_file_path(directory).expect("absolute");
        let settings = ObjectSettings::parse(&format!("{{\"url\": \"{url}\"}}")).expect("a url");
        ObjectAudit::open(&settings, sample, 7, repair).expect("readable")
    }

    #[test]
    fn what_is_bad_is_found_by_its_cause_and_removed_if_asked_for() {
        let directory = tempfile::tempdir().expect("temporary");
        let namespace = NamespaceId::new("model", CHUNK, 8);
        let shard = directory.path().join(namespace.to_string()).join("0");
        fs::create_dir_all(&shard).expect("made");
        fs::write(directory.path().join("somebody-elses"), b"?").expect("written");
        let file = |key: &[u8]| shard.join(crate::key::HexKey::from(key).to_string());
        let keys: Vec<[u8; 8]> = (0..8).map(|number| [number; 8]).collect();
        for key in &keys {
            fs::write(file(key), object(namespace, key)).expect("written");
        }
        let mut clean = audit(directory.path(), 100, false);
        assert_eq!((clean.objects(), clean.left()), (8, 8));
        assert_eq!(clean.check(100).expect("readable"), []);

        let spoil = |key: &[u8; 8], change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = object(namespace, key);
            change(&mut bytes);
            fs::write(file(key), bytes).expect("written");
        };
        spoil(&keys[1], &|bytes| bytes[2000] ^= 1);
        spoil(&keys[2], &|bytes| bytes.truncate(2000));
        spoil(&keys[3], &|bytes| bytes.truncate(3));
        spoil(&keys[4], &|bytes| *bytes = object(namespace, &keys[5]));
        spoil(&keys[6], &|bytes| *bytes = object(NamespaceId::new("other", CHUNK, 8), &keys[6]));
        let mut found = audit(directory.path(), 100, true).check(100).expect("readable");
        found.sort_by(|one, other| one.key.cmp(&other.key));
        let told: Vec<_> =
            found.iter().map(|each| (each.key.as_ref().map(|key| key[0]), each.what)).collect();
        assert_eq!(
            told,
            [
                (Some(1), "payload"),
                (Some(2), "length"),
                (Some(3), "header"),
                (Some(4), "name"),
                (Some(6), "namespace"),
            ]
        );
        assert!(found.iter().all(|each| each.repaired));
        assert_eq!(audit(directory.path(), 100, false).objects(), 3);
    }

    #[test]
    fn a_sample_is_as_large_as_asked_for_and_the_same_for_a_seed() {
        let directory = tempfile::tempdir().expect("temporary");
        let namespace = NamespaceId::new("model", CHUNK, 8);
        let shard = directory.path().join(namespace.to_string()).join("0");
        fs::create_dir_all(&shard).expect("made");
        for number in 0..50_u8 {
            let name = crate::key::HexKey::from(&[number % 16; 8][..]).to_string();
            let name = format!("{name}{number:02x}");
            fs::write(shard.join(name), b"bad").expect("written");
        }
        let places = |audit: &mut ObjectAudit| -> Vec<String> {
            audit.check(100).expect("readable").into_iter().map(|found| found.place).collect()
        };
        let mut one = audit(directory.path(), 10, false);
        assert_eq!((one.objects(), one.left()), (50, 10));
        let (one, same) = (places(&mut one), places(&mut audit(directory.path(), 10, false)));
        assert_eq!((one.len(), &one), (10, &same));
    }
}
