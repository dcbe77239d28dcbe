/* Init of the guest in test_vmm_qemu.py: counts on the console, and ends as the kernel command line says.
 * aenv.test_poweroff=N: powers off at N. aenv.test_panic=N: exits at N, which makes the kernel panic.
 * aenv.test_flood: writes to the console as fast as it can.
 * aenv.test_fill=N: writes N MiB to /dev/vda (its modules are in /modules, in this order: mmio, blk), then counts.
 * aenv.test_check=N: checks the first N MiB of /dev/vda for ever (disk_check.c); counts every twenty steps. */
#include "disk_check.c"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/syscall.h>
#include <unistd.h>

static long number(const char *line, const char *key) {
    const char *found = strstr(line, key);
    return found ? atol(found + strlen(key)) : -1;
}

static int load_disk(void) {
    const char *modules[] = {"/modules/mmio", "/modules/blk"};
    for (int i = 0; i < 2; i++) {
        int module = open(modules[i], O_RDONLY);
        if (module < 0 || syscall(SYS_finit_module, module, "", 0) != 0) {
            perror(modules[i]);
            return -1;
        }
    }
    mount("dev", "/dev", "devtmpfs", 0, NULL);
    return 0;
}

static int check(long mebibytes) {
    struct disk_check check;
    if (load_disk() != 0 || check_begin(&check, "/dev/vda", (uint32_t)mebibytes) != 0)
        return -1;
    for (long step = 0;; step++) {
        if (check_step(&check) != 0)
            return -1;
        if (step % 20 == 0)
            printf("count %ld\n", step / 20);
        if (step % 1000 == 0 && check_all(&check) != 0)
            return -1;
    }
}

static int fill(long mebibytes) {
    static char block[1 << 20];
    if (load_disk() != 0)
        return -1;
    int disk = open("/dev/vda", O_WRONLY | O_SYNC);
    memset(block, 'b', sizeof(block));
    for (long i = 0; i < mebibytes; i++)
        if (write(disk, block, sizeof(block)) != sizeof(block)) {
            perror("write");
            return -1;
        }
    printf("disk filled\n");
    return 0;
}

int main(void) {
    static char line[4096];
    static char word[4 << 20];
    setvbuf(stdout, NULL, _IONBF, 0);
    mount("proc", "/proc", "proc", 0, NULL);
    int file = open("/proc/cmdline", O_RDONLY);
    if (file < 0 || read(file, line, sizeof(line) - 1) <= 0) {
        printf("no command line\n");
        return 1;
    }
    long poweroff = number(line, "aenv.test_poweroff="), panic = number(line, "aenv.test_panic=");
    long mebibytes = number(line, "aenv.test_fill="), checked = number(line, "aenv.test_check=");
    if (mebibytes > 0 && fill(mebibytes) != 0)
        return 4;
    if (checked > 0)
        return check(checked);
    if (strstr(line, "aenv.test_flood"))
        for (;;)
            printf("%0250d\n", 0);
    memset(word, 'x', sizeof(word)); /* memory that a loaded copy must have */
    for (long count = 0;; count++) {
        for (size_t i = 0; i < sizeof(word); i += 4096)
            if (word[i] != 'x')
                printf("memory is damaged\n");
        printf("count %ld\n", count);
        if (count == poweroff)
            reboot(RB_POWER_OFF);
        if (count == panic)
            return 3;
        usleep(100000);
    }
}
