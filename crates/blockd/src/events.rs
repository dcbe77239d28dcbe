//! Events on their way to whoever subscribed.
//!
//! Publishing never waits: a subscriber that does not keep up loses its subscription, not some of the events.

use std::sync::mpsc::{sync_channel, Receiver, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;

/// Events that a subscriber may be behind.
const BACKLOG: usize = 1024;

/// Something that happened to a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A write found the file system full.
    NoSpace {
        /// Whose write.
        device: String,
    },
    /// A request failed for another reason.
    IoError {
        /// Whose request.
        device: String,
        /// What and why.
        message: String,
    },
    /// A device could not be opened again at the start.
    Failed {
        /// Which.
        device: String,
        /// Why.
        message: String,
    },
}

/// All subscriptions; clones share them.
#[derive(Clone, Default)]
pub struct Events(Arc<Mutex<Vec<SyncSender<Event>>>>);

impl Events {
    /// All events from now on. The channel ends when the subscriber is too far behind.
    #[must_use]
    pub fn subscribe(&self) -> Receiver<Event> {
        let (sender, receiver) = sync_channel(BACKLOG);
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(sender);
        receiver
    }

    /// Tell all subscribers.
    pub fn publish(&self, event: &Event) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|subscriber| subscriber.try_send(event.clone()).is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_subscriber_is_dropped_and_others_are_not() {
        let events = Events::default();
        let slow = events.subscribe();
        let event = Event::NoSpace { device: "d".into() };
        for _ in 0..BACKLOG {
            events.publish(&event);
        }
        let quick = events.subscribe();
        events.publish(&event);
        assert_eq!(slow.iter().count(), BACKLOG);
        assert_eq!(quick.try_iter().count(), 1);
    }
}
