/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The page tables of a stopped device: which pages its backup holds, and their checksums. Written
 * to a temporary file and renamed, so that there is either a whole one or none.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/state/arena.h"
#include "engine/state/memory.h"
#include "engine/state/page.h"

#define TABLES_MAGIC   0x53454c4241545749ull /* "IWTABLES", little endian */
#define TABLES_VERSION 1u

struct tables_header {
	uint64_t magic;
	uint32_t version;
	uint32_t bits_crc, crcs_crc;
	uint32_t header_crc; /* of this struct with header_crc 0 */
	uint64_t size_bytes;
};

static size_t bits_bytes(const struct isw_engine *e)
{
	return (e->pages + ISWI_GROUP_PAGES - 1) / ISWI_GROUP_PAGES * sizeof(uint32_t);
}

static struct tables_header make_header(const struct isw_engine *e)
{
	struct tables_header header;

	memset(&header, 0, sizeof(header));
	header.magic = TABLES_MAGIC;
	header.version = TABLES_VERSION;
	header.size_bytes = e->config.size_bytes;
	header.bits_crc = iswi_crc32c(e->backup_current, bits_bytes(e));
	header.crcs_crc = iswi_crc32c(e->crc, e->pages * sizeof(uint32_t));
	header.header_crc = iswi_crc32c(&header, sizeof(header));
	return header;
}

static int write_full(int fd, const void *data, size_t bytes)
{
	const char *at = data;

	while (bytes) {
		ssize_t n = write(fd, at, bytes);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -errno;
		at += n;
		bytes -= (size_t)n;
	}
	return 0;
}

static int write_tables(const struct isw_engine *e, const char *path)
{
	struct tables_header header = make_header(e);
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600), code;

	if (fd < 0)
		return -errno;
	code = write_full(fd, &header, sizeof(header));
	if (!code)
		code = write_full(fd, e->backup_current, bits_bytes(e));
	if (!code)
		code = write_full(fd, e->crc, e->pages * sizeof(uint32_t));
	if (!code && fsync(fd) < 0)
		code = -errno;
	if (close(fd) < 0 && !code)
		code = -errno;
	return code;
}

int isw_engine_save_tables(isw_engine *e, const char *path, struct isw_error *error)
{
	char temporary[4096];
	uint32_t used, copies;
	int code;

	iswi_staging_count(e, &used, &copies);
	if (used != copies || !e->has_backup)
		return iswi_error(error, -EBUSY,
				  "the backup does not hold every page; the device must settle "
				  "before its tables are saved");
	if (snprintf(temporary, sizeof(temporary), "%s.new", path) >= (int)sizeof(temporary))
		return iswi_error(error, -ENAMETOOLONG, "path too long: %s", path);
	code = write_tables(e, temporary);
	if (!code && rename(temporary, path) < 0)
		code = -errno;
	if (!code)
		return 0;
	unlink(temporary);
	return iswi_error(error, code, "cannot save the device's page tables to %s: %s", path,
			  strerror(-code));
}

static int read_tables(struct isw_engine *e, int fd)
{
	struct tables_header header, expected;
	char more;
	int code = iswi_read_full(fd, &header, sizeof(header));

	if (!code && header.magic != TABLES_MAGIC)
		return -EBADMSG;
	if (!code &&
	    (header.version != TABLES_VERSION || header.size_bytes != e->config.size_bytes))
		return -EBADMSG;
	if (!code)
		code = iswi_read_full(fd, e->backup_current, bits_bytes(e));
	if (!code)
		code = iswi_read_full(fd, e->crc, e->pages * sizeof(uint32_t));
	if (!code && iswi_read_full(fd, &more, 1) != -ENODATA)
		code = -EBADMSG;
	if (code)
		return code == -ENODATA ? -EBADMSG : code;
	expected = make_header(e);
	return memcmp(&expected, &header, sizeof(header)) ? -EBADMSG : 0;
}

int isw_engine_load_tables(isw_engine *e, const char *path, struct isw_error *error)
{
	int fd, code;

	if (!e->has_backup || e->standby)
		return iswi_error(error, -EINVAL, "a device without backup has no page tables");
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return iswi_error(error, -errno, "cannot open the page tables %s: %s", path,
				  strerror(errno));
	/* Half-read tables must not be served, by a successor either. */
	iswi_keep32(&e->arena->phase, ISWI_ARENA_UNFINISHED);
	code = read_tables(e, fd);
	close(fd);
	if (code) {
		memset(e->backup_current, 0, bits_bytes(e));
		memset(e->crc, 0, e->pages * sizeof(uint32_t));
	}
	iswi_arena_ready(e);
	if (!code)
		return 0;
	return iswi_error(error, code,
			  code == -EBADMSG ? "%s is damaged or not of this device and size"
					   : "cannot read %s",
			  path);
}
