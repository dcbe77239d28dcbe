//! The machine's power button, which a VMM presses to ask for a clean end.
//!
//! The kernel reports it as a key of an input device (source: Linux, include/uapi/linux/input.h).

use std::{
    fs::{self, File, OpenOptions},
    io::{ErrorKind, Read},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::OpenOptionsExt,
    },
    path::Path,
};

const KEY_EVENT: u16 = 1;
const KEY_POWER: u16 = 116;
const PRESSED: i32 = 1;
/// Two words of time, then type, code and value.
const EVENT_SIZE: usize = 24;

pub struct PowerButton {
    device: File,
}

impl PowerButton {
    /// The power button of this machine; None where the VMM offers none or the kernel has no driver for it.
    pub fn find(classes: &Path, devices: &Path) -> Option<Self> {
        let entries = fs::read_dir(classes).ok()?;
        entries.flatten().find_map(|entry| {
            let name = entry.file_name();
            let title = fs::read_to_string(entry.path().join("device/name")).ok()?;
            if !name.as_encoded_bytes().starts_with(b"event") || title.trim() != "Power Button" {
                return None;
            }
            let device = OpenOptions::new()
                .read(true)
                .custom_flags(libc::O_NONBLOCK)
                .open(devices.join(name))
                .ok()?;
            Some(Self { device })
        })
    }

    /// Takes all waiting events. True when one of them is a press; an error when the device is gone.
    pub fn was_pressed(&mut self) -> std::io::Result<bool> {
        let mut pressed = false;
        let mut buffer = [0u8; EVENT_SIZE * 16];
        loop {
            match self.device.read(&mut buffer) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(length) => pressed |= buffer[..length].chunks_exact(EVENT_SIZE).any(is_press),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(pressed),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl AsFd for PowerButton {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}

fn is_press(event: &[u8]) -> bool {
    let word = |at: usize| u16::from_ne_bytes([event[at], event[at + 1]]);
    let value = i32::from_ne_bytes([event[20], event[21], event[22], event[23]]);
    (word(16), word(18), value) == (KEY_EVENT, KEY_POWER, PRESSED)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: u16, code: u16, value: i32) -> Vec<u8> {
        [
            &[0u8; 16][..],
            &kind.to_ne_bytes(),
            &code.to_ne_bytes(),
            &value.to_ne_bytes(),
        ]
        .concat()
    }

    #[test]
    fn only_a_press_of_the_power_key_counts() {
        assert!(is_press(&event(1, 116, 1)));
        assert!(!is_press(&event(1, 116, 0)));
        assert!(!is_press(&event(1, 28, 1)));
        assert!(!is_press(&event(0, 116, 1)));
    }

    #[test]
    fn the_button_is_found_by_its_name() {
        let root = tempfile::tempdir().unwrap();
        let (classes, devices) = (root.path().join("class"), root.path().join("dev"));
        fs::create_dir_all(&devices).unwrap();
        assert!(PowerButton::find(&classes, &devices).is_none());
        for (node, title) in [("event0", "AT Keyboard\n"), ("event1", "Power Button\n")] {
            fs::create_dir_all(classes.join(node).join("device")).unwrap();
            fs::write(classes.join(node).join("device/name"), title).unwrap();
        }
        assert!(PowerButton::find(&classes, &devices).is_none());
        fs::write(devices.join("event1"), event(1, 116, 1)).unwrap();
        let mut button = PowerButton::find(&classes, &devices).unwrap();
        // A regular file ends where a device would make the reader wait, which counts as a device that is gone.
        assert!(button.was_pressed().is_err());
    }
}
