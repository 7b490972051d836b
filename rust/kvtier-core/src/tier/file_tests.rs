use super::*;

const CHUNK: usize = 5000;

fn config(path: &Path, chunks: u64) -> FileStoreConfig {
    FileStoreConfig {
        path: path.to_owned(),
        // One file more, for the writer.
        capacity_bytes: (chunks + 1) * 3 * HEADER_BYTES as u64,
        chunk_bytes: CHUNK,
        key_bytes: 8,
        namespace: "{\"model\":\"a\"}".to_owned(),
        writers: 1,
    }
}

fn open(path: &Path, chunks: u64) -> FileStore {
    FileStore::open(&config(path, chunks)).expect("opens")
}

fn key(number: u8) -> [u8; 8] {
    [number; 8]
}

fn chunk(number: u8) -> Vec<u8> {
    (0..CHUNK).map(|at| number ^ at as u8).collect()
}

fn put(store: &FileStore, number: u8) -> KeyBatch {
    let bytes = chunk(number);
    store.put(&key(number), &bytes, || Checksum::of(&bytes)).expect("stored")
}

/// The bytes under a key, if its checksum is right.
fn get(store: &FileStore, number: u8) -> Result<Vec<u8>, TierError> {
    let mut place = vec![0; CHUNK];
    let stored = store.get(&key(number), &mut place)?;
    assert_eq!(stored, Checksum::of(&place));
    Ok(place)
}

fn files(path: &Path) -> Vec<PathBuf> {
    let directories = read_directory(&path.join("chunks")).expect("listed");
    directories.iter().flat_map(|path| read_directory(path).expect("listed")).collect()
}

#[test]
fn chunks_come_back_and_survive_a_restart() {
    let directory = tempfile::tempdir().expect("temporary");
    let store = open(directory.path(), 4);
    (0..3).for_each(|number| assert!(put(&store, number).is_empty()));
    assert_eq!(get(&store, 1).expect("here"), chunk(1));
    assert!(matches!(get(&store, 9), Err(TierError::Missing(_))));
    store.close();
    let store = open(directory.path(), 4);
    (0..3).for_each(|number| assert_eq!(get(&store, number).expect("here"), chunk(number)));
    assert_eq!(store.usage().chunks, 3);
}

#[test]
fn the_capacity_holds_and_the_oldest_goes() {
    let directory = tempfile::tempdir().expect("temporary");
    let store = open(directory.path(), 2);
    put(&store, 0);
    put(&store, 1);
    get(&store, 0).expect("used again");
    assert_eq!(put(&store, 2), KeyBatch::from_flat(key(1).to_vec(), 8).unwrap());
    assert_eq!(files(directory.path()).len(), 2);
    assert!(store.usage().used_bytes <= store.usage().capacity_bytes);
    store.close();
    // A smaller capacity at restart drops what no longer fits.
    let store = open(directory.path(), 1);
    assert_eq!(store.usage().chunks, 1);
    assert_eq!(files(directory.path()).len(), 1);
}

/// Puts a whole chunk of another key or namespace in a file's place.
fn swap(path: &Path, number: u8, namespace: Checksum) {
    let header = Header::new(&key(number), CHUNK, Checksum::of(&chunk(number)), namespace);
    fs::write(path, [&header.page()[..], &chunk(number)].concat()).unwrap();
}

#[test]
fn damage_of_every_kind_is_an_error_and_never_bytes() {
    type Damage = fn(&Path);
    let kinds: [(&str, Damage); 7] = [
        ("cut", |path| File::options().write(true).open(path).unwrap().set_len(4500).unwrap()),
        ("empty", |path| fs::write(path, []).unwrap()),
        ("zeros", |path| fs::write(path, vec![0; HEADER_BYTES + CHUNK]).unwrap()),
        ("flip", |path| {
            let mut bytes = fs::read(path).unwrap();
            bytes[HEADER_BYTES + 77] ^= 4;
            fs::write(path, bytes).unwrap();
        }),
        ("gone", |path| fs::remove_file(path).unwrap()),
        ("another namespace's", |path| swap(path, 5, Checksum(1))),
        ("another key's", |path| swap(path, 6, Checksum::of(b"{\"model\":\"a\"}"))),
    ];
    for (kind, damage) in kinds {
        let directory = tempfile::tempdir().expect("temporary");
        let store = open(directory.path(), 2);
        put(&store, 5);
        damage(&files(directory.path())[0]);
        let mut place = vec![0; CHUNK];
        match store.get(&key(5), &mut place) {
            // Told apart from good bytes by the checksum, which the job compares.
            Ok(stored) => assert_ne!(stored, Checksum::of(&place), "{kind}"),
            Err(TierError::Corrupt { .. } | TierError::Missing(_)) => {}
            Err(error) => panic!("{kind}: {error}"),
        }
        store.discard(&key(5));
        assert!(matches!(get(&store, 5), Err(TierError::Missing(_))), "{kind}");
        store.index.lock().validate().expect("no slot lost");
        put(&store, 5);
        assert_eq!(get(&store, 5).expect("stored anew"), chunk(5), "{kind}");
    }
}

#[test]
fn damaged_and_foreign_files_are_dropped_at_open() {
    let directory = tempfile::tempdir().expect("temporary");
    let store = open(directory.path(), 4);
    (0..3).for_each(|number| drop(put(&store, number)));
    store.close();
    let found = files(directory.path());
    fs::write(&found[0], b"short").expect("damaged");
    fs::copy(&found[1], directory.path().join("chunks/00/999.kv")).expect("copied");
    fs::write(directory.path().join("chunks/00/notes.txt"), b"?").expect("written");
    fs::write(directory.path().join("tmp/3.kv"), b"half").expect("written");
    let store = open(directory.path(), 4);
    assert_eq!(store.usage().chunks, 2);
    assert_eq!(files(directory.path()).len(), 2);
    assert!(read_directory(&directory.path().join("tmp")).expect("listed").is_empty());
    store.index.lock().validate().expect("no slot lost");
}

#[test]
fn another_identity_is_refused_with_both_shown() {
    let directory = tempfile::tempdir().expect("temporary");
    open(directory.path(), 2).close();
    let mut other = config(directory.path(), 2);
    other.namespace = "{\"model\":\"b\"}".to_owned();
    let error = FileStore::open(&other).err().expect("refused");
    assert!(matches!(error, TierError::Identity { .. }));
    let text = error.to_string();
    let differences = "use another directory: namespace.model is \"a\", expected \"b\"\n";
    assert!(text.contains(differences), "{text}");
    assert!(text.contains("{\"model\":\"a\"}") && text.contains("{\"model\":\"b\"}"), "{text}");
    fs::write(directory.path().join(IDENTITY_FILE), "?").expect("written");
    assert!(matches!(FileStore::open(&other), Err(TierError::Identity { .. })), "not readable");
}

#[test]
fn a_second_owner_is_refused_with_the_pid() {
    let directory = tempfile::tempdir().expect("temporary");
    let store = open(directory.path(), 2);
    let error = FileStore::open(&config(directory.path(), 2)).err().expect("refused");
    assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
    store.close();
    open(directory.path(), 2);
}

#[test]
fn too_small_and_too_large_leave_nothing_behind() {
    let directory = tempfile::tempdir().expect("temporary");
    let path = directory.path().join("new");
    let mut small = config(&path, 0);
    assert!(matches!(FileStore::open(&small), Err(TierError::Capacity { .. })));
    small.capacity_bytes = u64::MAX / 2;
    assert!(matches!(FileStore::open(&small), Err(TierError::DeviceTooSmall { .. })));
    assert!(!path.exists());
}

#[test]
fn a_path_that_is_no_directory_is_an_error() {
    let file = tempfile::NamedTempFile::new().expect("temporary");
    let path = file.path().join("store");
    assert!(matches!(FileStore::open(&config(&path, 2)), Err(TierError::Io { .. })));
}

#[test]
fn a_failed_write_keeps_the_slot_and_leaves_no_temporary_file() {
    let directory = tempfile::tempdir().expect("temporary");
    let store = open(directory.path(), 2);
    // A directory in place of the slot's file makes the rename fail.
    fs::create_dir_all(store.chunk_path(0).join("x")).expect("made");
    let bytes = chunk(1);
    let error = store.put(&key(1), &bytes, || Checksum::of(&bytes)).expect_err("no rename");
    assert!(matches!(error, TierError::Io { what: "renaming", .. }), "{error}");
    assert!(read_directory(&directory.path().join("tmp")).expect("listed").is_empty());
    fs::remove_dir_all(store.chunk_path(0)).expect("removed");
    put(&store, 1);
    assert_eq!(get(&store, 1).expect("here"), chunk(1));
    store.index.lock().validate().expect("no slot lost");
}
