//! Which node has which key: one server with its replicas, or the map of a cluster.
//!
//! The map is asked for at the first use, and again when it looks old: a node named another one
//! for a key, could not serve it, or was not reached. Asking is one at a time, not more often than
//! every [`REFRESH_PAUSE`], in the background, and the map in use stays until there is a new one.
//! A node keeps its connections and its breaker over changes of the map.
//!
//! Memory: 16 bytes a slot of a cluster (256 KiB).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::Value;
use redis::cluster_routing::Slot;

use super::endpoint::Endpoint;
use super::failed::Failed;
use super::node::{Node, NodeParts, Work};
use crate::sync::Mutex;
use crate::tier::network::NetworkError;

/// Between two questions for the map.
const REFRESH_PAUSE: Duration = Duration::from_millis(200);

/// A master and those that follow it.
#[derive(Clone)]
pub(super) struct Shard {
    pub(super) master: Arc<Node>,
    pub(super) replicas: Vec<Arc<Node>>,
}

impl Shard {
    /// Who serves reads if the master does not: a replica that is not switched off.
    pub(super) fn replica(&self) -> Option<&Arc<Node>> {
        self.replicas.iter().find(|replica| replica.is_well())
    }
}

/// See the module.
pub(super) struct Topology {
    seeds: Vec<Endpoint>,
    parts: Arc<NodeParts>,
    nodes: Mutex<HashMap<Endpoint, Arc<Node>>>,
    map: Mutex<Option<Arc<Map>>>,
    /// When the map was asked for last; held while it is asked for.
    asked: tokio::sync::Mutex<Option<Instant>>,
}

/// Shards, and which slot is whose.
pub(super) struct Map {
    shards: Vec<Shard>,
    /// Empty for a server without slots, all of whose keys are the first shard's.
    slots: HashMap<Slot, usize>,
}

impl Topology {
    pub(super) fn new(seeds: Vec<Endpoint>, parts: Arc<NodeParts>) -> Self {
        Self {
            seeds,
            parts,
            nodes: Mutex::default(),
            map: Mutex::default(),
            asked: tokio::sync::Mutex::default(),
        }
    }

    /// The map. Waits for the first one; never for a later one.
    pub(super) async fn map(&self) -> Result<Arc<Map>, Failed> {
        if let Some(map) = self.current() {
            return Ok(map);
        }
        let mut asked = self.asked.lock().await;
        if let Some(map) = self.current() {
            return Ok(map);
        }
        if asked.is_some_and(|asked| asked.elapsed() < REFRESH_PAUSE) {
            let node = self.seeds.first().map_or_else(String::new, Endpoint::to_string);
            return Err(NetworkError::SwitchedOff { node }.into());
        }
        let map = self.ask().await;
        *asked = Some(Instant::now());
        map
    }

    /// A node by its address.
    pub(super) fn node(&self, endpoint: &Endpoint) -> Arc<Node> {
        let mut nodes = self.nodes.lock();
        let node = nodes.entry(endpoint.clone());
        Arc::clone(node.or_insert_with(|| Node::new(endpoint.clone(), Arc::clone(&self.parts))))
    }

    /// Asks for the map again, in the background.
    pub(super) fn refresh(self: &Arc<Self>) {
        let topology = Arc::clone(self);
        tokio::spawn(async move { topology.refresh_now().await });
    }

    /// Asks for the map again, unless that was done a moment ago, or somebody does it just now.
    pub(super) async fn refresh_now(&self) {
        let Ok(mut asked) = self.asked.try_lock() else {
            return;
        };
        if asked.is_none_or(|asked| asked.elapsed() >= REFRESH_PAUSE) {
            // What went wrong is counted where the map is used.
            let _ = self.ask().await;
            *asked = Some(Instant::now());
        }
    }

    fn current(&self) -> Option<Arc<Map>> {
        self.map.lock().clone()
    }

    /// Asks the nodes in turn, those that are well first.
    async fn ask(&self) -> Result<Arc<Map>, Failed> {
        let mut candidates: Vec<Arc<Node>> = Vec::new();
        if let Some(map) = self.current() {
            for shard in &map.shards {
                candidates.extend(shard.replicas.iter().chain([&shard.master]).cloned());
            }
        }
        candidates.extend(self.seeds.iter().map(|seed| self.node(seed)));
        candidates.sort_by_key(|node| !node.is_well());
        let mut last = None;
        for node in candidates {
            match self.ask_node(&node).await {
                Ok(map) => {
                    let map = Arc::new(map);
                    let used: Vec<_> = map.endpoints().cloned().collect();
                    self.nodes.lock().retain(|endpoint, _| used.contains(endpoint));
                    *self.map.lock() = Some(Arc::clone(&map));
                    return Ok(map);
                }
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or(Failed::Stale))
    }

    async fn ask_node(&self, node: &Arc<Node>) -> Result<Map, Failed> {
        let mut lease = node.lease(Work::Lookup).await?;
        let slots = lease.wire.ask(redis::cmd("CLUSTER").arg("SLOTS")).await;
        match slots {
            Ok(slots) => {
                let map = self.cluster(&node.endpoint, &slots);
                let map = map.ok_or_else(|| lease.wire.confused("CLUSTER SLOTS is no map"));
                lease.end(map)
            }
            // It has no cluster support, or does not let us ask.
            Err(Failed::Network(NetworkError::Refused { .. })) => {
                let role = match lease.wire.ask(&redis::cmd("ROLE")).await {
                    Err(Failed::Network(NetworkError::Refused { .. })) => Ok(Value::Nil),
                    role => role,
                };
                lease.end(role).map(|role| self.single(node, &role))
            }
            Err(error) => lease.end(Err(error)),
        }
    }

    /// The map of a cluster: `[[first, last, master, replica, ...], ...]`.
    fn cluster(&self, asked: &Endpoint, slots: &Value) -> Option<Map> {
        let mut map = Map { shards: Vec::new(), slots: HashMap::new() };
        let mut numbers: HashMap<Endpoint, usize> = HashMap::new();
        for range in list(slots)? {
            let [first, last, nodes @ ..] = list(range)? else {
                return None;
            };
            let (first, last) = (number(first)?, number(last)?);
            let mut nodes = nodes.iter().filter_map(|node| {
                let [host, port, ..] = list(node)? else {
                    return None;
                };
                // A node that does not know its own name is the one that was asked.
                let host = text(host).filter(|host| !host.is_empty());
                let host = host.unwrap_or_else(|| asked.host.clone());
                Some(Endpoint { host, port: number(port)? })
            });
            let Some(master) = nodes.next() else {
                continue;
            };
            let shard = *numbers.entry(master.clone()).or_insert_with(|| {
                let replicas = nodes.map(|endpoint| self.node(&endpoint)).collect();
                map.shards.push(Shard { master: self.node(&master), replicas });
                map.shards.len() - 1
            });
            map.slots.extend((first..=last).filter_map(Slot::new).map(|slot| (slot, shard)));
        }
        (!map.shards.is_empty()).then_some(map)
    }

    /// One server: the master of the one that was asked, and those that follow it, as far as it
    /// tells: `[master, offset, [[host, port, offset], ...]]` or `[slave, host, port, ...]`.
    fn single(&self, asked: &Arc<Node>, role: &Value) -> Map {
        let told = list(role).unwrap_or_default();
        let at =
            |host: &Value, port: &Value| Some(Endpoint { host: text(host)?, port: number(port)? });
        let shard = match told {
            [role, host, port, ..] if text(role).as_deref() == Some("slave") => {
                let master = at(host, port).map(|endpoint| self.node(&endpoint));
                let replicas = vec![Arc::clone(asked)];
                Shard { master: master.unwrap_or_else(|| Arc::clone(asked)), replicas }
            }
            [_, _, followers, ..] => {
                let followers = list(followers).unwrap_or_default().iter().filter_map(list);
                let replicas = followers.filter_map(|follower| match follower {
                    [host, port, ..] => Some(self.node(&at(host, port)?)),
                    _ => None,
                });
                Shard { master: Arc::clone(asked), replicas: replicas.collect() }
            }
            _ => Shard { master: Arc::clone(asked), replicas: Vec::new() },
        };
        Map { shards: vec![shard], slots: HashMap::new() }
    }
}

impl Map {
    /// The shard of a name.
    pub(super) fn shard_of(&self, name: &str) -> Result<&Shard, Failed> {
        let first = self.slots.is_empty().then_some(&0);
        let number = first.or_else(|| self.slots.get(&Slot::for_key(name)));
        number.and_then(|&number| self.shards.get(number)).ok_or_else(|| {
            let message = "no node has the slot of this key".to_owned();
            Failed::NotNow(NetworkError::Refused { node: "the cluster".to_owned(), message })
        })
    }

    /// Those that hold all keys together.
    pub(super) fn masters(&self) -> impl Iterator<Item = &Arc<Node>> {
        self.shards.iter().map(|shard| &shard.master)
    }

    fn endpoints(&self) -> impl Iterator<Item = &Endpoint> {
        let nodes =
            self.shards.iter().flat_map(|shard| shard.replicas.iter().chain([&shard.master]));
        nodes.map(|node| &node.endpoint)
    }
}

fn list(value: &Value) -> Option<&[Value]> {
    match value {
        Value::Array(items) => Some(items),
        _ => None,
    }
}

fn text(value: &Value) -> Option<String> {
    match value {
        Value::BulkString(bytes) => String::from_utf8(bytes.clone()).ok(),
        Value::SimpleString(text) => Some(text.clone()),
        _ => None,
    }
}

/// A number, of whichever of the ways that servers write them.
fn number(value: &Value) -> Option<u16> {
    match value {
        Value::Int(number) => u16::try_from(*number).ok(),
        other => text(other)?.parse().ok(),
    }
}
