/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The page tables of a stopped device: which pages its backup holds, and their seals. Written to a
 * temporary file and renamed, so that there is either a whole one or none.
 *
 * Those of a device that seals are authenticated. Their key comes from the device's with a salt of
 * its own, as an epoch's does, and is used for one file. Part after part of the file is data of a
 * seal whose plaintext is the tag of the part before, so the last tag stands for all of them.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "engine/state/arena.h"
#include "engine/state/memory.h"
#include "engine/state/page.h"
#include "engine/state/seal.h"
#include "seal/seal.h"

#define TABLES_MAGIC   0x53454c4241545749ull /* "IWTABLES", little endian */
#define TABLES_VERSION 1u
#define SEALED_VERSION 2u
/* Of a part that is authenticated at once: libraries count in int. */
#define PART_BYTES_MAX (64ull << 20)

struct tables_header {
	uint64_t magic;
	uint32_t version;
	uint32_t bits_crc, seals_crc;
	uint32_t header_crc; /* of this struct with header_crc 0 */
	uint64_t size_bytes;
};

/* After it, in version 2. */
struct sealed_header {
	unsigned char salt[ISWI_SALT_BYTES]; /* of the key of these tables */
	uint32_t epochs_used[ISWI_EPOCHS];
	unsigned char epochs[ISWI_EPOCHS][ISWI_SALT_BYTES];
	unsigned char tag[ISWI_SEAL_TAG_BYTES]; /* of all else */
};

static size_t bits_bytes(const struct isw_engine *e)
{
	return (e->pages + ISWI_GROUP_PAGES - 1) / ISWI_GROUP_PAGES * sizeof(uint32_t);
}

static size_t seals_bytes(const struct isw_engine *e)
{
	return e->pages * iswi_seal_bytes(e);
}

static void *seals(const struct isw_engine *e)
{
	return iswi_sealed(e) ? (void *)e->seals : (void *)e->crc;
}

static struct tables_header make_header(const struct isw_engine *e)
{
	struct tables_header header;

	memset(&header, 0, sizeof(header));
	header.magic = TABLES_MAGIC;
	header.version = iswi_sealed(e) ? SEALED_VERSION : TABLES_VERSION;
	header.size_bytes = e->config.size_bytes;
	header.bits_crc = iswi_crc32c(e->backup_current, bits_bytes(e));
	header.seals_crc = iswi_crc32c(seals(e), seals_bytes(e));
	header.header_crc = iswi_crc32c(&header, sizeof(header));
	return header;
}

/* ----------------------------------------------------------------------- authenticity */

/* The tag of what came before becomes that of this, too. */
static void chain(struct isw_engine *e, uint64_t *number, const void *data, size_t bytes,
		  unsigned char *tag)
{
	const unsigned char *at = data;

	while (bytes) {
		unsigned char sealed[ISWI_SEAL_TAG_BYTES];
		struct iswi_sealing what = {
			.key = ISWI_TABLES_KEY,
			.data = at,
			.data_bytes = ISWI_MIN(bytes, PART_BYTES_MAX),
			.in = tag,
			.out = sealed,
			.bytes = sizeof(sealed),
		};

		memcpy(what.nonce, number, sizeof(*number));
		e->seal_ops->seal(e->sealer, &what, tag);
		++*number;
		at += what.data_bytes;
		bytes -= what.data_bytes;
	}
}

/* Of what is in the arena and in these headers, but for the tag itself. Control thread. */
static void authenticate(struct isw_engine *e, const struct tables_header *header,
			 const struct sealed_header *sealed, unsigned char *tag_out)
{
	uint64_t number = 0;

	memset(tag_out, 0, ISWI_SEAL_TAG_BYTES);
	iswi_seal_derive(e, ISWI_TABLES_KEY, sealed->salt);
	chain(e, &number, e->backup_current, bits_bytes(e), tag_out);
	chain(e, &number, seals(e), seals_bytes(e), tag_out);
	chain(e, &number, header, sizeof(*header), tag_out);
	chain(e, &number, sealed, offsetof(struct sealed_header, tag), tag_out);
}

/* With the salts of those epochs only whose pages are there. */
static int make_sealed_header(struct isw_engine *e, const struct tables_header *header,
			      struct sealed_header *sealed)
{
	uint64_t pages[ISWI_EPOCHS];

	memset(sealed, 0, sizeof(*sealed));
	if (getrandom(sealed->salt, sizeof(sealed->salt), 0) != (ssize_t)sizeof(sealed->salt))
		return -EIO;
	iswi_epochs_count(e, pages);
	for (uint32_t i = 0; i < ISWI_EPOCHS; i++) {
		if (!pages[i])
			continue;
		sealed->epochs_used[i] = 1;
		memcpy(sealed->epochs[i], e->arena->epochs[i].salt, ISWI_SALT_BYTES);
	}
	authenticate(e, header, sealed, sealed->tag);
	return 0;
}

/* ------------------------------------------------------------------------------ saving */

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

static int write_tables(struct isw_engine *e, const char *path)
{
	struct tables_header header = make_header(e);
	struct sealed_header sealed;
	int fd, code = iswi_sealed(e) ? make_sealed_header(e, &header, &sealed) : 0;

	if (code)
		return code;
	fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	if (fd < 0)
		return -errno;
	code = write_full(fd, &header, sizeof(header));
	if (!code && iswi_sealed(e))
		code = write_full(fd, &sealed, sizeof(sealed));
	if (!code)
		code = write_full(fd, e->backup_current, bits_bytes(e));
	if (!code)
		code = write_full(fd, seals(e), seals_bytes(e));
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

/* ----------------------------------------------------------------------------- loading */

/* The keys of former starts, and one of this start. */
static int take_epochs(struct isw_engine *e, const struct sealed_header *sealed)
{
	for (uint32_t i = 0; i < ISWI_EPOCHS; i++) {
		memcpy(e->arena->epochs[i].salt, sealed->epochs[i], ISWI_SALT_BYTES);
		iswi_keep32(&e->arena->epochs[i].used, sealed->epochs_used[i]);
		if (sealed->epochs_used[i])
			iswi_seal_derive(e, i, sealed->epochs[i]);
	}
	return iswi_epoch_begin(e, 0);
}

static int check_tag(struct isw_engine *e, const struct tables_header *header,
		     const struct sealed_header *sealed)
{
	unsigned char tag[ISWI_SEAL_TAG_BYTES];

	authenticate(e, header, sealed, tag);
	return iswi_seal_tags_equal(tag, sealed->tag) ? 0 : -EKEYREJECTED;
}

static int read_tables(struct isw_engine *e, int fd)
{
	const uint32_t version = iswi_sealed(e) ? SEALED_VERSION : TABLES_VERSION;
	struct tables_header header, expected;
	struct sealed_header sealed;
	char more;
	int code = iswi_read_full(fd, &header, sizeof(header));

	if (!code && header.magic != TABLES_MAGIC)
		return -EBADMSG;
	if (!code && header.version != version &&
	    (header.version == SEALED_VERSION || header.version == TABLES_VERSION))
		return -EPROTONOSUPPORT;
	if (!code && (header.version != version || header.size_bytes != e->config.size_bytes))
		return -EBADMSG;
	if (!code && iswi_sealed(e))
		code = iswi_read_full(fd, &sealed, sizeof(sealed));
	if (!code)
		code = iswi_read_full(fd, e->backup_current, bits_bytes(e));
	if (!code)
		code = iswi_read_full(fd, seals(e), seals_bytes(e));
	if (!code && iswi_read_full(fd, &more, 1) != -ENODATA)
		code = -EBADMSG;
	if (code)
		return code == -ENODATA ? -EBADMSG : code;
	expected = make_header(e);
	if (memcmp(&expected, &header, sizeof(header)))
		return -EBADMSG;
	if (iswi_sealed(e))
		code = check_tag(e, &header, &sealed);
	return code || !iswi_sealed(e) ? code : take_epochs(e, &sealed);
}

/* Far memory ends with its jobs: what an earlier start has left is nobody's, and never read. */
static void forget_far(struct isw_engine *e)
{
	for (uint64_t page = iswi_engine_size_bytes(e) / ISW_PAGE_BYTES; page < e->pages; page++)
		iswi_backup_current_clear(e, page);
}

static const char *why_not_loaded(int code)
{
	switch (code) {
	case -EBADMSG:
		return "%s is damaged or not of this device and size";
	case -EKEYREJECTED:
		return "%s is of a device with another key, or was altered";
	case -EPROTONOSUPPORT:
		return "%s is of a device that seals its pages where this one does not, or the "
		       "reverse";
	default:
		return "cannot read %s";
	}
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
		memset(seals(e), 0, seals_bytes(e));
	}
	forget_far(e);
	iswi_arena_ready(e);
	if (!code)
		return 0;
	return iswi_error(error, code, why_not_loaded(code), path);
}
