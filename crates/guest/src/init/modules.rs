//! Loads the kernel modules that the initramfs carries, in the order that its builder wrote down.

use std::{
    fs::{self, File},
    io,
    os::fd::AsRawFd,
    path::Path,
};

use super::log;

const MODULE_DIRECTORY: &str = "/lib/modules";
const ORDER_DIRECTORY: &str = "/etc/aenv";

/// Loads every file named in `order` (one path per line, dependencies first).
///
/// A module that does not load is logged and skipped: whether it was needed shows when its device is waited for.
pub fn load_all(order: &Path) {
    let names = match fs::read_to_string(order) {
        Ok(names) => names,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return,
        Err(error) => return log::warn(&format!("{}: {error}", order.display())),
    };
    for name in entries(&names) {
        if let Err(error) = load(Path::new(name)) {
            log::warn(&format!("module {name}: {error}"));
        }
    }
}

/// Removes the module files: an initramfs lives in memory.
pub fn remove_files() {
    for directory in [MODULE_DIRECTORY, ORDER_DIRECTORY] {
        match fs::remove_dir_all(directory) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                log::warn(&format!("{directory}: {error}"))
            }
            _ => {}
        }
    }
}

fn entries(order: &str) -> impl Iterator<Item = &str> {
    order
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
}

fn load(path: &Path) -> io::Result<()> {
    let file = File::open(path)?;
    // SAFETY: the descriptor is open for the whole call, and the parameter string is a constant.
    let status =
        unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), c"".as_ptr(), 0) };
    if status == 0 {
        return Ok(());
    }
    match io::Error::last_os_error() {
        error if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
        error => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_blank_lines_are_skipped() {
        let order = "# made by the builder\n\n/lib/modules/a.ko\n  /lib/modules/b.ko  \n";
        assert_eq!(
            entries(order).collect::<Vec<_>>(),
            ["/lib/modules/a.ko", "/lib/modules/b.ko"]
        );
    }
}
