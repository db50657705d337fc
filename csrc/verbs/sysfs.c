/* SPDX-License-Identifier: Apache-2.0 */
/* What the kernel says of RDMA devices in its files, beside libibverbs. */
#include "verbs/sysfs.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define DEVICES "infiniband"
#define NODES   "infiniband_verbs"

bool iswi_sysfs_device(char *name_out, size_t bytes)
{
	DIR *directory = opendir(ISWI_SYSFS_CLASS "/" DEVICES);
	struct dirent *entry;
	bool found = false;

	if (directory == NULL)
		return false;
	while (!found && (entry = readdir(directory)) != NULL) {
		if (entry->d_name[0] == '.')
			continue;
		snprintf(name_out, bytes, "%.*s", (int)bytes - 1, entry->d_name);
		found = true;
	}
	closedir(directory);
	return found;
}

/* What the node in that directory belongs to. 0 or -errno. */
static int read_name(int directory, char *name_out, size_t bytes)
{
	int fd = openat(directory, "ibdev", O_RDONLY | O_CLOEXEC), code = 0;
	ssize_t n;

	if (fd < 0)
		return -errno;
	n = read(fd, name_out, bytes - 1);
	if (n < 0)
		code = -errno;
	close(fd);
	if (code != 0)
		return code;
	name_out[n] = '\0';
	name_out[strcspn(name_out, "\n")] = '\0';
	return 0;
}

/* Directories, not names: a name may be changed, or be another's soon. */
void iswi_sysfs_open(struct iswi_sysfs *at, const char *class_directory, const char *node)
{
	char path[512], name[128];

	*at = (struct iswi_sysfs){.node_fd = -1, .device_fd = -1};
	snprintf(path, sizeof(path), "%s/" NODES, class_directory);
	if (access(path, F_OK) != 0)
		return;
	snprintf(path, sizeof(path), "%s/" NODES "/%s", class_directory, node);
	at->node_fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (at->node_fd < 0 || read_name(at->node_fd, name, sizeof(name)) != 0) {
		at->missed = at->node_fd >= 0 || errno == ENOENT;
		return;
	}
	snprintf(path, sizeof(path), "%s/" DEVICES "/%s", class_directory, name);
	at->device_fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

void iswi_sysfs_close(struct iswi_sysfs *at)
{
	if (at->node_fd >= 0)
		close(at->node_fd);
	if (at->device_fd >= 0)
		close(at->device_fd);
}

bool iswi_sysfs_is_leaving(const struct iswi_sysfs *at)
{
	char name[128];
	int code;

	if (at->missed)
		return true;
	if (at->node_fd < 0)
		return false;
	code = read_name(at->node_fd, name, sizeof(name));
	return code == -ENOENT || code == -ENODEV;
}

bool iswi_sysfs_has_gone(const struct iswi_sysfs *at, uint32_t wait_ms)
{
	const struct timespec tick = {.tv_nsec = 1000000};

	if (at->device_fd < 0 || !iswi_sysfs_is_leaving(at))
		return false;
	while (faccessat(at->device_fd, "ports", F_OK, 0) == 0 || errno != ENOENT) {
		if (wait_ms-- == 0)
			return false;
		nanosleep(&tick, NULL);
	}
	return true;
}
