/* SPDX-License-Identifier: Apache-2.0 */
/* What the kernel says of RDMA devices in its files, beside libibverbs. */
#include "verbs/sysfs.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "util/util.h"

/* A GID table may have a thousand entries; addresses are among the first. */
#define GIDS_LOOKED_AT 128u

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

/* 0 or -errno. */
static int first_line(int directory, const char *path, char *line_out, size_t bytes)
{
	int fd = openat(directory, path, O_RDONLY | O_CLOEXEC), code = 0;
	ssize_t n;

	if (fd < 0)
		return -errno;
	n = read(fd, line_out, bytes - 1);
	if (n < 0)
		code = -errno;
	close(fd);
	if (code != 0)
		return code;
	line_out[n] = '\0';
	line_out[strcspn(line_out, "\n")] = '\0';
	return 0;
}

/* Of a file below a port's directory. */
static bool port_line(const struct isw_rdma_port *port, const char *what, uint32_t index,
		      char *text_out, size_t bytes)
{
	char path[256];

	snprintf(path, sizeof(path), ISWI_SYSFS_CLASS "/" DEVICES "/%s/ports/%u/%s/%u",
		 port->device, port->port, what, index);
	return first_line(AT_FDCWD, path, text_out, bytes) == 0;
}

static void add_gid(struct isw_rdma_port *port, uint32_t index)
{
	static const uint8_t nobody[16];
	struct isw_rdma_gid *gid = &port->gid[port->gids];
	unsigned int part[8];
	char text[64];

	if (!port_line(port, "gids", index, text, sizeof(text)) ||
	    sscanf(text, "%4x:%4x:%4x:%4x:%4x:%4x:%4x:%4x", &part[0], &part[1], &part[2], &part[3],
		   &part[4], &part[5], &part[6], &part[7]) != 8)
		return;
	for (uint32_t i = 0; i < 8; i++) {
		gid->raw[2 * i] = (uint8_t)(part[i] >> 8);
		gid->raw[2 * i + 1] = (uint8_t)part[i];
	}
	if (memcmp(gid->raw, nobody, sizeof(nobody)) == 0)
		return;
	gid->index = index;
	gid->type = ISW_RDMA_GID_OTHER;
	if (port_line(port, "gid_attrs/types", index, text, sizeof(text)) &&
	    strcmp(text, "RoCE v2") == 0)
		gid->type = ISW_RDMA_GID_ROCE_V2;
	gid->scope = port_line(port, "gid_attrs/ndevs", index, text, sizeof(text))
			     ? if_nametoindex(text)
			     : 0;
	port->gids++;
}

void iswi_sysfs_gids(struct isw_rdma_port *port, uint32_t count)
{
	for (uint32_t i = 0; i < GIDS_LOOKED_AT && i < count; i++)
		if (port->gids < ISW_RDMA_GIDS_MAX)
			add_gid(port, i);
}

/* What the node in that directory belongs to. 0 or -errno. */
static int read_name(int directory, char *name_out, size_t bytes)
{
	return first_line(directory, "ibdev", name_out, bytes);
}

/* Directories, not names: a name may be changed, or be another's soon. */
void iswi_sysfs_open(struct iswi_sysfs *at, const char *class_directory, const char *node)
{
	char path[512], name[128];
	int code;

	*at = (struct iswi_sysfs){.node_fd = -1, .device_fd = -1};
	snprintf(path, sizeof(path), "%s/" NODES, class_directory);
	if (access(path, F_OK) != 0)
		return;
	snprintf(path, sizeof(path), "%s/" NODES "/%s", class_directory, node);
	at->node_fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	code = at->node_fd < 0 ? -errno : read_name(at->node_fd, name, sizeof(name));
	at->missed = code == -ENOENT || code == -ENODEV;
	if (code != 0)
		return;
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

bool iswi_sysfs_has_gone(struct iswi_sysfs *at, uint32_t wait_ms)
{
	const struct timespec tick = {.tv_nsec = 1000000};
	uint_fast64_t none = 0, until_ns = iswi_now_ns() + wait_ms * 1000000ull;

	if (at->device_fd < 0 || !iswi_sysfs_is_leaving(at))
		return false;
	if (!atomic_compare_exchange_strong(&at->until_ns, &none, until_ns))
		until_ns = none; /* all wait together */
	while (faccessat(at->device_fd, "ports", F_OK, 0) == 0 || errno != ENOENT) {
		if (iswi_now_ns() >= until_ns)
			return false;
		nanosleep(&tick, NULL);
	}
	return true;
}
