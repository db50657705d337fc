/* SPDX-License-Identifier: Apache-2.0 */
/* What the kernel says of RDMA devices in its files, and whether one is to be left. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "util/util.h"
#include "verbs/verbs.h"

#define SYSFS_UVERBS "/sys/class/infiniband_verbs"
#define STATE_ACTIVE "4:" /* "4: ACTIVE" (enum ib_port_state) */

bool iswi_verbs_kernel_device(char *name_out, size_t bytes)
{
	DIR *directory = opendir(ISWI_VERBS_SYSFS);
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

/* The file's first line. 0 or -errno. */
static int first_line(const char *path, char *line_out, size_t bytes)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n;
	int code;

	if (fd < 0)
		return -errno;
	n = read(fd, line_out, bytes - 1);
	code = n < 0 ? -errno : 0;
	close(fd);
	if (code != 0)
		return code;
	line_out[n] = '\0';
	line_out[strcspn(line_out, "\n")] = '\0';
	return 0;
}

enum iswi_verbs_state iswi_verbs_kernel_state(const char *name, const char *uverbs)
{
	char path[512], line[64];
	struct dirent *entry;
	bool active = false, seen = false;
	DIR *ports;
	int code;

	if (access(SYSFS_UVERBS, F_OK) != 0)
		return ISWI_VERBS_ACTIVE;
	/* A device that is being removed loses its node first, whose name may be another's by now.
	 */
	snprintf(path, sizeof(path), SYSFS_UVERBS "/%s/ibdev", uverbs);
	code = first_line(path, line, sizeof(line));
	if (code == -ENOENT || code == -ENODEV || (code == 0 && strcmp(line, name) != 0))
		return ISWI_VERBS_LEAVING;
	snprintf(path, sizeof(path), ISWI_VERBS_SYSFS "/%s/ports", name);
	ports = opendir(path);
	if (ports == NULL)
		return ISWI_VERBS_ACTIVE;
	while (!active && (entry = readdir(ports)) != NULL) {
		if (entry->d_name[0] == '.')
			continue;
		snprintf(path, sizeof(path), ISWI_VERBS_SYSFS "/%s/ports/%.16s/state", name,
			 entry->d_name);
		if (first_line(path, line, sizeof(line)) == 0) {
			seen = true;
			active = strncmp(line, STATE_ACTIVE, strlen(STATE_ACTIVE)) == 0;
		}
	}
	closedir(ports);
	return seen && !active ? ISWI_VERBS_DOWN : ISWI_VERBS_ACTIVE;
}

bool iswi_verbs_is_to_go(const struct iswi_verbs *verbs, struct iswi_vdev *dev, uint64_t down_ns,
			 uint64_t *since_ns)
{
	uint64_t now_ns = iswi_now_ns();

	switch (verbs->state(dev)) {
	case ISWI_VERBS_LEAVING:
		return true;
	case ISWI_VERBS_DOWN:
		if (*since_ns == 0)
			*since_ns = now_ns;
		return now_ns - *since_ns >= down_ns;
	default:
		*since_ns = 0;
		return false;
	}
}
