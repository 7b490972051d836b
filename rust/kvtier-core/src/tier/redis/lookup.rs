//! Asking the servers which chunks they have: one round trip a node, all nodes at once.

use std::io::IoSlice;
use std::sync::Arc;

use tokio::task::JoinSet;

use super::client::Client;
use super::failed::Failed;
use super::node::{Node, Work};
use super::topology::Shard;
use crate::tier::network::{Counted, Question};

/// The keys of a question that one shard has.
struct Part {
    shard: Shard,
    /// Where they are in the question.
    positions: Vec<u32>,
    /// The commands that ask for them, packed.
    commands: Vec<u8>,
}

impl Client {
    /// Asks a question. What stays open of it, since a node failed, is absent for a while.
    pub(super) async fn ask(self: Arc<Self>, mut question: Question) {
        self.counters.count(Counted::Questions);
        self.counters.add(Counted::KeysAsked, question.keys().len() as u64);
        let all: Vec<u32> = (0..question.keys().len() as u32).collect();
        let mut moved = self.ask_keys(&mut question, all).await;
        if !moved.is_empty() {
            self.topology.refresh_now().await;
            moved = self.ask_keys(&mut question, moved).await;
        }
        drop((question, moved));
    }

    /// Asks for the keys at `positions`; gives back those whose nodes do not have them any more.
    async fn ask_keys(self: &Arc<Self>, question: &mut Question, positions: Vec<u32>) -> Vec<u32> {
        let parts = match self.split(question, positions).await {
            Ok(parts) => parts,
            Err(error) => {
                self.note_failed(&error);
                return Vec::new();
            }
        };
        let mut moved = Vec::new();
        if let [part] = &parts[..] {
            // On this thread: one server is the rule, and another thread costs a wake-up.
            let outcome = self.ask_shard(part).await;
            self.answer(question, &part.positions, outcome, &mut moved);
            return moved;
        }
        let mut asked = JoinSet::new();
        for part in parts {
            let client = Arc::clone(self);
            asked.spawn(async move {
                let outcome = client.ask_shard(&part).await;
                (part.positions, outcome)
            });
        }
        while let Some(answered) = asked.join_next().await {
            // Else a panic, which the runtime has caught: its keys stay open.
            if let Ok((positions, outcome)) = answered {
                self.answer(question, &positions, outcome, &mut moved);
            }
        }
        moved
    }

    fn answer(
        &self,
        question: &mut Question,
        positions: &[u32],
        outcome: Result<Vec<i64>, Failed>,
        moved: &mut Vec<u32>,
    ) {
        match outcome {
            Ok(present) => question.answer(positions, |at| present[at] > 0),
            Err(Failed::Moved(_)) => moved.extend(positions),
            Err(error) => self.note_failed(&error),
        }
    }

    /// The keys at `positions`, by shard.
    async fn split(&self, question: &Question, positions: Vec<u32>) -> Result<Vec<Part>, Failed> {
        let map = self.topology.map().await?;
        let mut parts: Vec<Part> = Vec::new();
        let mut head = String::new();
        for position in positions {
            let name = self.names.of(question.keys().get(position as usize));
            let shard = map.shard_of(&name)?;
            let same = |part: &Part| Arc::ptr_eq(&part.shard.master, &shard.master);
            let at = parts.iter().position(same).unwrap_or_else(|| {
                let shard = shard.clone();
                let part = Part { shard, positions: Vec::new(), commands: Vec::new() };
                parts.push(part);
                parts.len() - 1
            });
            let Part { positions, commands, .. } = &mut parts[at];
            positions.push(position);
            // All names have one length.
            if head.is_empty() {
                head = format!("*2\r\n$6\r\nEXISTS\r\n${}\r\n", name.len());
            }
            commands.extend_from_slice(head.as_bytes());
            commands.extend_from_slice(name.as_bytes());
            commands.extend_from_slice(b"\r\n");
        }
        Ok(parts)
    }

    async fn ask_shard(&self, part: &Part) -> Result<Vec<i64>, Failed> {
        // Ends: a new connection is not stale.
        loop {
            let first = self.ask_node(&part.shard.master, part);
            let outcome =
                self.hedged(&part.shard, first, |replica| self.ask_node(replica, part)).await;
            match outcome {
                Err(Failed::Stale) => {}
                outcome => return outcome,
            }
        }
    }

    async fn ask_node(&self, node: &Arc<Node>, part: &Part) -> Result<Vec<i64>, Failed> {
        let mut lease = node.lease(Work::Lookup).await?;
        self.counters.count(Counted::RoundTrips);
        let answers = async {
            lease.wire.send(&mut [IoSlice::new(&part.commands)]).await?;
            lease.wire.numbers(part.positions.len()).await
        };
        let answers = answers.await;
        match answers {
            // The other replies to this pipeline were not read.
            Err(error) if !error.is_the_nodes() => lease.abandon(error),
            answers => lease.end(answers),
        }
    }

    fn note_failed(&self, error: &Failed) {
        if let Failed::Network(error) | Failed::NotNow(error) = error {
            self.parts.failed(error);
            self.topology.refresh();
        }
    }
}
