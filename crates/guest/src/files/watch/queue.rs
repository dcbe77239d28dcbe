//! The events of one watch that wait to be delivered: merged, bounded, and completed with entries.

use std::{
    collections::{BTreeSet, HashMap},
    path::Path,
};

use super::super::{entry, owners::Owners};
use crate::proto::filesystem::{EventType, FilesystemEvent};

/// Events kept for somebody who does not collect them.
pub const CAPACITY: usize = 8192;

/// Events in order. A WRITE or CHMOD directly after another one of the same name is the same news and is merged, until the
/// first of them has been delivered: an upload of any size that is collected afterwards reads CREATE, CHMOD, WRITE.
#[derive(Debug, Default)]
pub struct EventQueue {
    events: Vec<FilesystemEvent>,
    /// The last event of each name, as an index into `events`.
    latest: HashMap<String, usize>,
    /// Events whose entry is not known or no longer true.
    unresolved: BTreeSet<usize>,
    dropped: u64,
}

impl EventQueue {
    /// Appends an event; drops it if the queue is full.
    pub fn push(&mut self, name: &Path, kind: EventType) {
        let name = name.to_string_lossy().into_owned();
        if matches!(kind, EventType::Write | EventType::Chmod) {
            if let Some(&index) = self.latest.get(&name) {
                if self.events[index].r#type() == kind {
                    self.unresolved.insert(index);
                    return;
                }
            }
        }
        if self.events.len() >= CAPACITY {
            self.dropped += 1;
            return;
        }
        self.latest.insert(name.clone(), self.events.len());
        self.unresolved.insert(self.events.len());
        self.events.push(FilesystemEvent {
            name,
            r#type: kind.into(),
            entry: None,
        });
    }

    /// Adds entries to the events that can have one; `root` is the watched directory.
    pub fn resolve(&mut self, root: &Path) {
        let owners = Owners::default();
        for index in std::mem::take(&mut self.unresolved) {
            let event = &mut self.events[index];
            if matches!(
                event.r#type(),
                EventType::Create | EventType::Write | EventType::Chmod
            ) {
                event.entry = entry::describe(&root.join(&event.name), &owners).ok();
            }
        }
    }

    /// Takes all events, and how many were dropped since the last time.
    pub fn drain(&mut self) -> (Vec<FilesystemEvent>, u64) {
        self.latest.clear();
        self.unresolved.clear();
        (
            std::mem::take(&mut self.events),
            std::mem::take(&mut self.dropped),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(queue: &mut EventQueue) -> Vec<(String, EventType)> {
        let (events, _) = queue.drain();
        events
            .into_iter()
            .map(|event| (event.name.clone(), event.r#type()))
            .collect()
    }

    #[test]
    fn merges_repeated_writes_and_chmods_of_a_name() {
        let mut queue = EventQueue::default();
        for (name, kind) in [
            ("a", EventType::Create),
            ("a", EventType::Chmod),
            ("a", EventType::Chmod),
            ("a", EventType::Write),
            ("b", EventType::Write),
            ("a", EventType::Write),
            ("a", EventType::Chmod),
        ] {
            queue.push(Path::new(name), kind);
        }
        let expected = [
            ("a", EventType::Create),
            ("a", EventType::Chmod),
            ("a", EventType::Write),
            ("b", EventType::Write),
            ("a", EventType::Chmod),
        ];
        assert_eq!(
            kinds(&mut queue),
            expected.map(|(name, kind)| (name.to_owned(), kind))
        );
        queue.push(Path::new("a"), EventType::Chmod);
        assert_eq!(kinds(&mut queue).len(), 1);
    }

    #[test]
    fn is_bounded_and_counts_what_it_dropped() {
        let mut queue = EventQueue::default();
        for number in 0..CAPACITY + 3 {
            queue.push(Path::new(&number.to_string()), EventType::Create);
        }
        let (events, dropped) = queue.drain();
        assert_eq!((events.len(), dropped), (CAPACITY, 3));
        assert_eq!(queue.drain(), (Vec::new(), 0));
    }

    #[test]
    fn entries_come_with_what_still_exists() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("here"), "12345").unwrap();
        let mut queue = EventQueue::default();
        queue.push(Path::new("here"), EventType::Write);
        queue.push(Path::new("here"), EventType::Rename);
        queue.push(Path::new("gone"), EventType::Create);
        queue.resolve(dir.path());
        let (events, _) = queue.drain();
        let sizes: Vec<_> = events
            .iter()
            .map(|event| event.entry.as_ref().map(|entry| entry.size))
            .collect();
        assert_eq!(sizes, [Some(5), None, None]);
    }
}
